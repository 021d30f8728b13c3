--[==[ Tollgate: decide, charge and refund, in one call, by the server's clock.

A rate limit that several nodes share is one counter that several nodes want to read, judge and
change. Reading first and writing later lets two of them pass on the same last unit, so the whole
decision runs here, where nothing can come between: all limits of a request, all or nothing. The call
itself costs Redis more than the arithmetic, so one call may carry many checks; they are run
in order, as if each had come alone.

    read ──▶ decide in memory, check after check ──▶ write what has changed
             (a counter is read once a call)          first what grows, then what shrinks

Writing last has three reasons. A counter that ten checks of a batch share is read and written once. A
key that does not hold what it should is found before anything is written. And Redis looks at
`maxmemory` only before the first write of a script, and only if that command can grow
(RPUSH, LSET, SET): a script that begins by trimming would go on to grow without being asked. So what
grows goes first, and a full server refuses the call as a whole.

KEYS
    per step its ban keys, then one key per limit, in the order of the steps. All in one slot of a Cluster.

ARGV
    [1]  the time in microseconds since the epoch, for tests; empty: the server's clock. With a time
         given, keys live ten minutes at least, so that real time does not eat an invented trace.
    then per step either
         a limit line                     a check of that one limit
         check LIMITS [BANS [REPEAT]]     how many limits and ban keys it has (BANS 0 unless said), and how
           and a line per limit           often to run it (1 unless said, 1000 at most): first come, first served
         refund LIMITS
           and per limit its line, with the cost that was charged, and a receipt: AT RESET_AFTER, the time
           of the decision and the reset_after that it answered, both in microseconds
    A key stands once in a step: no counter is charged twice by one check.
    A limit line is  ALGORITHM QUOTA WINDOW_US COST [burst=N] [queue=N] [count_denied=1] [window=fixed]
    (window=fixed promises that this key is never used with another window). A call holds checks or refunds, not both.

RETURNS one flat list of integers:
    the time of the decisions in microseconds, then per step
         check     how many results follow, and for each result and each of its limits five numbers:
                   allowed (1 or 0), remaining, retry_after, next_after, reset_after (µs; -1: never).
                   If REPEAT is more than the results, all others are the same as the last.
                   Or 0 and one number: the subject is banned for so many µs (-1: for good); nothing was charged.
         refund    1
    A step whose key holds something else answers an error `TOLLGATE_FOREIGN …` in place of its count, and the
    other steps run. That error is the whole reply if it is the only step, or if the something was found late, inside
    a list; then nothing was written, and each step may be asked again alone. A request that makes no sense is an
    error `TOLLGATE_ARGUMENT …`, and nothing was written either. Where steps before the trouble had to be written at once
    (refunds, or two windows on one counter), the error begins with `TOLLGATE_PARTLY`: none of them may be asked again.

To forget a counter, DEL its key. A ban is any value under its ban key, for as long as it lives.

STATE (docs/redis-state.md has it byte by byte; every key has a TTL that ends when it stops to matter)
    log      a list    time time time …     one for each unit, oldest first; or with units, and the total at its end
    pair     a string  start window current previous
    bucket   a string  time level scale

TWIN OF tollgate-core/src/algorithm/{log,pair,bucket}.rs. The integers are those of docs/algorithms.md: all
of them below 2^53, which a Lua number holds exactly. Change both or neither.
]==]

local call, try, format, match, floor = redis.call, redis.pcall, string.format, string.match, math.floor

-- Each function and each local that a function uses from outside is made anew at every call, so what few checks need is
-- made inside what needs it.

-- Lua prints 1.76e+15 for a time, and how Redis prints a number depends on its version: print it here.
local function text_of(whole) return format('%.0f', whole) end

-- nil unless the text is a whole number that a Lua number holds.
local function whole_of(text)
    local number = tonumber(text)
    if number and number >= 0 and number < 2 ^ 53 and number % 1 == 0 then return number end
end

local function ceil_div(a, b) return a > 0 and floor((a - 1) / b) + 1 or 0 end

local function fail(message) error({ err = message }) end

-- What to answer where a read has failed.
local function unreadable(reply)
    if not reply.err then return end
    if not match(reply.err, '^WRONGTYPE') then fail(reply.err) end
    return 'TOLLGATE_FOREIGN the key holds another type'
end

local is_time_given = ARGV[1] ~= ''
local now
if is_time_given then
    now = whole_of(ARGV[1])
    if not now or now >= 2 ^ 52 then fail('TOLLGATE_ARGUMENT the time is 0 to 2^52 - 1 microseconds, or empty') end
else
    local time = call('TIME')
    now = time[1] * 1000000 + time[2]
end
local now_text = text_of(now)

-- A TTL in milliseconds. One more than needed: the server may count it from the millisecond before `now`.
local function ttl_of(reset_after)
    local ms = ceil_div(reset_after, 1000) + 1
    if is_time_given and ms < 600000 then ms = 600000 end
    return text_of(ms)
end

-- The states this call has read, by key; and those that must be written, in order.
local states, changed, changed_count = {}, {}, 0

local reply, reply_count = { now }, 1

-- What a state machine writes by itself in the end, before all others: growth only.
local write_quick

-- Says how a state has changed. It is written in the end; writing it earlier clears this.
local function change(state, how)
    if not state.change then
        changed_count = changed_count + 1
        changed[changed_count] = state
    end
    state.change = how
end

-- Whether something was written before all was decided.
local has_written = false

local function write(state)
    local machine = state.limit.machine
    machine.grow(state)
    has_written = true
    machine.shrink(state)
    state.change = false
end

-- ── log: sliding, sliding-log ────────────────────────────────────────────────────────────────────────
--
-- A list of times, oldest first, one for each unit: then its length is the total, the time at which n units will have
-- left is an element, and neither has to be kept. Only where that would be wasteful (many units at once) does a
-- negative number follow a time: it counts for so many units. Such a list is *counted*: it ends with
-- minus the total, and is walked from its ends, in chunks.
--
--     plain     t t t t t t                           6 units
--     counted   t t t  t -25  t  t -3  -32            a time alone is still one unit
--
-- What is pending is kept beside the list until the end of the call: `dropped` elements at its front, and
-- an own newest entry of `units` at now in place of its last `cut` elements. All decisions of a
-- call share one `now`, so one entry is enough; `units` is false while the newest is the list's own.
--
-- A plain list whose newest entry is in the past, with nothing to drop, is what nearly every check meets: this is what
-- the fields of a fresh state and the first branch of each function are for.

local function new_log()
    local NEVER, FOREVER, EXACT_QUOTA_MAX = -1, math.huge, 1000
    -- How the lifetime of a key is said: to the next multiple of 0.9 s. An admission that ends in the same step as
    -- the one before it need not say it again, and no key lives a second too long.
    local LIFE_STEP = 900000
    local NOT_A_LOG = 'TOLLGATE_FOREIGN the list is not one of times and units'

    local function is_in_tick_of_now(time, limit) return floor(time / limit.tick) == floor(now / limit.tick) end

    -- What a log needs less often.
    local function new_depths()
        local function number_at(key, index)
            local number = tonumber(call('LINDEX', key, text_of(index)))
            if not number or number % 1 ~= 0 then fail(NOT_A_LOG) end
            return number
        end

        -- The entry of a counted list that begins with element `index`, and where the next one begins. Nothing if that
        -- is behind the entries or replaced by our own.
        local function entry_at(state, index)
            local walk = state.walk
            if not walk then
                walk = { count = 0, chunk = 4 }
                state.walk = walk
            end
            while walk.count < index + 3 and not walk.is_whole do
                local from, size = walk.count, walk.chunk
                local chunk = call('LRANGE', state.key, text_of(from), text_of(from + size - 1))
                local count = #chunk
                for i = 1, count do walk[from + i] = tonumber(chunk[i]) or fail(NOT_A_LOG) end
                walk.count, walk.is_whole, walk.chunk = from + count, count < size, size < 2048 and size * 4 or size
            end
            local time, units = walk[index + 1], walk[index + 2]
            if index >= walk.count - 1 or time >= state.cut_time then return end
            if units < 0 and index < walk.count - 2 then return time, -units, index + 2 end
            return time, 1, index + 1
        end

        -- Makes one entry at now of all that is later than now and of the newest entry, if that is in now's tick.
        local function gather(state, limit)
            local looked, size, is_done = state.is_counted and 1 or 0, 8, false
            local cut, units, entry_units, run_time = looked, 0, 1, nil
            repeat
                local chunk = call('LRANGE', state.key, text_of(-looked - size), text_of(-looked - 1))
                is_done = #chunk < size
                for i = #chunk, 1, -1 do
                    local number = tonumber(chunk[i]) or fail(NOT_A_LOG)
                    looked = looked + 1
                    if number < 0 then
                        entry_units = -number
                    else
                        if number <= now then
                            if not is_in_tick_of_now(number, limit) or run_time and number ~= run_time then
                                is_done = true
                                break
                            end
                            run_time = number
                        end
                        cut, units, entry_units, state.cut_time = looked, units + entry_units, 1, number
                    end
                end
                size = size < 2048 and size * 4 or size
            until is_done
            state.cut, state.units, state.time = cut, units, now
            if state.oldest >= state.cut_time then state.oldest = now end
        end

        local function forget_counted(state, left_until)
            local time, units, after = entry_at(state, 0)
            while time and time <= left_until do
                state.total, state.dropped = state.total - units, after
                time, units, after = entry_at(state, after)
            end
            state.oldest = time or state.time
        end

        -- In a plain list times ascend and nothing must be added up: by doubling steps, then by halving.
        local function forget_plain(state, left_until)
            -- What is before `low` has left, `high` has not.
            local low, high, step, oldest = 1, state.length - 1, 1, state.time
            while low < high do
                local probe = low + step - 1
                if probe >= high then probe = floor((low + high) / 2) end
                local time = number_at(state.key, probe)
                if time > left_until then
                    high, oldest, step = probe, time, 1
                else
                    low, step = probe + 1, step * 2
                end
            end
            state.dropped, state.total = low, state.length - low
            if oldest >= (state.cut_time or FOREVER) then oldest = state.time end
            state.oldest = oldest
        end

        -- When the entry goes with which `units` have left, the oldest first.
        local function time_of(state, units)
            if not state.is_counted then
                local index = (state.dropped or 0) + units - 1
                return index < (state.length or 0) - (state.cut or 0) and number_at(state.key, index) or state.time
            end
            local index, time, entry_units = state.dropped or 0, nil, nil
            repeat
                time, entry_units, index = entry_at(state, index)
                units = units - (entry_units or units)
            until units <= 0
            return time or state.time
        end

        -- Takes units from the oldest entries, at last from our own.
        local function take_oldest(state, excess)
            state.total = state.total - excess
            local dropped, oldest = state.dropped or 0, nil
            if state.is_counted then
                local time, units, after = entry_at(state, dropped)
                while time and units <= excess do
                    dropped, excess, state.is_oldest_cut = after, excess - units, false
                    time, units, after = entry_at(state, after)
                end
                if time and excess > 0 then
                    state.walk[dropped + 2], state.is_oldest_cut, excess = excess - units, true, 0
                end
                oldest = time
            else
                local kept = (state.length or 0) - (state.cut or 0) - dropped
                local taken = kept < excess and kept or excess
                dropped, excess = dropped + taken, excess - taken
                oldest = taken < kept and number_at(state.key, dropped)
            end
            state.dropped, state.units, state.oldest = dropped, state.units - excess, oldest or state.time
        end

        -- Our entry as elements, and the total where the list is counted. A few units are so many times.
        local function tail_of(state)
            local tail, units = {}, state.units
            if not state.is_counted and units <= 4 and state.limit.tick == 1 then
                for i = 1, units do tail[i] = now_text end
                return tail
            end
            tail[1] = now_text
            if units > 1 then tail[2] = text_of(-units) end
            tail[#tail + 1] = text_of(-state.total)
            return tail
        end

        local function grow(state)
            local key, cut, tail = state.key, state.is_stale and 0 or state.cut or 0, tail_of(state)
            local count, dropped = #tail, state.dropped or 0
            if state.is_oldest_cut then call('LSET', key, text_of(dropped + 1), text_of(state.walk[dropped + 2])) end
            for i = 1, cut < count and cut or count do call('LSET', key, text_of(i - 1 - cut), tail[i]) end
            if count > cut then call('RPUSH', key, unpack(tail, cut + 1)) end
            state.tail_count, state.surplus = count, cut > count and cut - count or 0
        end

        -- The last element that belongs to an entry at or before a tick. Times ascend, so by halving.
        local function find(key, limit, tick, count)
            local low, high = 0, count
            while low < high do
                local middle = floor((low + high) / 2)
                local number = number_at(key, middle)
                if number < 0 then number = number_at(key, middle - 1) end
                if floor(number / limit.tick) <= tick then low = middle + 1 else high = middle end
            end
            return low - 1
        end

        -- Takes up to `left` units from the entry of a counted list that ends with element `index`. How many it took.
        local function take_from(key, index, left)
            local entry_time, taken, emptied = nil, 0, 0
            while index >= 0 and left > taken do
                local units, width, number = 1, 1, number_at(key, index)
                if number < 0 then units, width, number = -number, 2, number_at(key, index - 1) end
                if entry_time and number ~= entry_time then break end
                entry_time = number
                if units > left - taken then
                    call('LSET', key, text_of(index), text_of(left - taken - units))
                    taken = left
                else
                    for i = index - width + 1, index do call('LSET', key, text_of(i), '') end
                    taken, emptied = taken + units, emptied + width
                end
                index = index - width
            end
            if emptied > 0 then call('LREM', key, '0', '') end
            return taken
        end

        -- Takes up to the limit's cost from the newest entry of a tick. False if nothing is left of the list.
        local function give_back(key, limit, tick)
            local length, last = call('LLEN', key), number_at(key, -1)
            local index = find(key, limit, tick, last < 0 and length - 1 or length)
            local number = index >= 0 and number_at(key, index)
            if number and number < 0 then number = number_at(key, index - 1) end
            if not number or floor(number / limit.tick) ~= tick then return true end
            has_written = true
            if last >= 0 then return call('LREM', key, text_of(-limit.cost), text_of(number)) < length end
            local total = -last - take_from(key, index, limit.cost)
            if total == 0 then
                call('DEL', key)
                return false
            end
            call('LSET', key, '-1', text_of(-total))
            return true
        end

        return {
            gather = gather, forget_counted = forget_counted, forget_plain = forget_plain, time_of = time_of,
            take_oldest = take_oldest, grow = grow, give_back = give_back,
        }
    end

    local depths
    local function deep()
        depths = depths or new_depths()
        return depths
    end

    local function load_counted(key, limit, total)
        local tail = call('LRANGE', key, '-3', '-2')
        local last = tonumber(tail[#tail])
        local time = last and last < 0 and tonumber(tail[1]) or last
        if not time or time < 0 then return end
        return time, {
            key = key, limit = limit, total = total, time = time, units = false, change = false,
            cut_time = time, is_counted = true, oldest = false,
        }
    end

    local function serves(state, limit)
        return state.limit.window == limit.window and state.limit.tick == limit.tick
    end

    -- The keys that quick checks have charged, in order, and the limit of each. Those whose life must be said anew.
    local quick_count, quick_keys, quick_limit_of, renewed_count, renewed_keys = 0, {}, {}, 0, {}

    -- With `GT` for `if_longer` a life is never shortened.
    local function live(key, time, window, if_longer)
        local command, ends = 'PEXPIREAT', nil
        if is_time_given then
            command, ends = 'PEXPIRE', ttl_of(time + window - now)
        else
            ends = text_of(floor((time + window) / LIFE_STEP) * (LIFE_STEP / 1000) + LIFE_STEP / 1000 + 2)
        end
        if if_longer then return call(command, key, ends, if_longer) end
        call(command, key, ends)
    end

    -- The check that nearly every check is: one unit against one limit, on a plain list that is in order and of which
    -- nothing has left. It needs no state, unless the key is met again. Answers into the reply from `at` on. False if it is
    -- not that check.
    local function quick(key, limit, at)
        local last, left_until = try('LINDEX', key, '-1'), now - limit.window
        if not last or last.err or quick_limit_of[key] then return false end
        -- A text that is no number ends the call here, as TOLLGATE_FOREIGN: that costs half of what asking would.
        local time = last + 0
        if not (time < now and time > left_until and time >= 0) then return false end
        local oldest = call('LINDEX', key, '0') + 0
        if oldest <= left_until then return false end
        local room, next_after = limit.quota - call('LLEN', key), oldest - left_until
        if room > 0 then
            quick_count = quick_count + 1
            quick_keys[quick_count], quick_limit_of[key] = key, limit
            if time < limit.said_from then
                renewed_count = renewed_count + 1
                renewed_keys[renewed_count] = key
            end
            reply[at], reply[at + 1], reply[at + 2], reply[at + 3] = 1, 1, room - 1, 0
            reply[at + 4], reply[at + 5] = next_after, limit.window
            return true
        elseif room == 0 then
            reply[at], reply[at + 1], reply[at + 2], reply[at + 3] = 1, 0, 0, next_after
            reply[at + 4], reply[at + 5] = next_after, time - left_until
            return true
        end
        return false
    end

    function write_quick()
        for i = 1, quick_count do
            if quick_limit_of[quick_keys[i]] then call('RPUSH', quick_keys[i], now_text) end
        end
        for i = 1, renewed_count do
            local limit = quick_limit_of[renewed_keys[i]]
            if limit then live(renewed_keys[i], now, limit.window) end
        end
    end

    local function load(key, limit)
        local last = try('LINDEX', key, '-1')
        if not last then return { key = key, limit = limit, total = 0, units = false, change = false, oldest = false } end
        local time, left_until, state = tonumber(last), now - limit.window, nil
        if not time or time % 1 ~= 0 then return nil, unreadable(last) or NOT_A_LOG end
        if time < 0 then
            time, state = load_counted(key, limit, -time)
            if not time then return nil, NOT_A_LOG end
        end
        if time <= left_until then
            return {
                key = key, limit = limit, total = 0, units = false, change = false, oldest = false,
                is_stale = true, is_settled = true,
            }
        end
        local oldest = tonumber(call('LINDEX', key, '0'))
        if not oldest or oldest < 0 then return nil, NOT_A_LOG end
        if not state then
            local length = call('LLEN', key)
            state = {
                key = key, limit = limit, total = length, time = time, units = false, change = false,
                oldest = oldest, length = length,
            }
        end
        state.oldest = oldest
        if time > now then
            deep().gather(state, limit)
            state.is_settled = true
        end
        if oldest <= left_until then
            if state.is_counted then deep().forget_counted(state, left_until) else deep().forget_plain(state, left_until) end
            state.is_settled = true
        end
        return state
    end

    local function fits(state, limit, cost) return state.total + cost <= limit.quota end

    local function wait(state, limit, cost)
        if cost > limit.quota then return NEVER end
        local must_leave = state.total + cost - limit.quota
        if must_leave <= 0 then return 0 end
        local time = must_leave == 1 and state.oldest or deep().time_of(state, must_leave)
        return time + limit.window - now
    end

    local function append(state, limit, units)
        local time, how = state.time, 'written'
        state.total = state.total + units
        if time == now or time and limit.tick > 1 and is_in_tick_of_now(time, limit) then
            if not state.units then deep().gather(state, limit) end
            state.units = state.units + units
            if state.change == 'written within its life' then how = state.change end
        else
            state.time, state.units = now, units
            if not time then
                state.oldest = now
            elseif time >= limit.said_from then
                how = 'written within its life'
            end
            if state.is_counted then state.cut, state.cut_time = 1, FOREVER end
        end
        change(state, how)
    end

    -- Like load; a key that a quick check has charged is from here on charged by its state.
    local function load_charged(key, limit)
        local quick_limit = quick_limit_of[key]
        if not quick_limit then return load(key, limit) end
        quick_limit_of[key] = nil
        local state = load(key, quick_limit)
        append(state, quick_limit, 1)
        if serves(state, limit) then return state end
        write(state)
        return load(key, limit)
    end

    local function report(state, limit)
        local quota, total = limit.quota, state.total
        if total == 0 then return quota, 0, 0 end
        local window_left = limit.window - now
        if total <= quota then return quota - total, state.oldest + window_left, state.time + window_left end
        return 0, wait(state, limit, 1), state.time + window_left
    end

    local function admit(state, limit, cost)
        append(state, limit, cost)
        return 0, limit.quota - state.total, state.oldest + limit.window - now, limit.window
    end

    local function refuse(state, limit, cost)
        if limit.count_denied then
            append(state, limit, cost < limit.quota and cost or limit.quota)
            if state.total > limit.quota then deep().take_oldest(state, state.total - limit.quota) end
        elseif state.is_settled or state.time and not limit.is_window_fixed then
            change(state, state.change or 'looked at')
        end
        return wait(state, limit, cost), report(state, limit)
    end

    local function peek(state, limit) return wait(state, limit, 1), report(state, limit) end

    local function grow(state)
        if not state.units then return end
        if state.units > 1 or state.cut or state.limit.tick > 1 then return deep().grow(state) end
        call('RPUSH', state.key, now_text)
    end

    local function shrink(state)
        local key, dropped, surplus = state.key, state.dropped or 0, state.surplus or 0
        if state.is_stale then
            if not state.units then return call('DEL', key) end
            call('LTRIM', key, text_of(-(state.tail_count or 1)), '-1')
        elseif dropped > 0 or surplus > 0 then
            call('LTRIM', key, text_of(dropped), text_of(-1 - surplus))
            if state.is_counted and not state.units then call('LSET', key, '-1', text_of(-state.total)) end
        end
        if state.change == 'written within its life' then return end
        -- To a limit with a longer window, what this one refuses matters longer than to this one.
        live(key, state.time, state.limit.window, state.change == 'looked at' and 'GT')
    end

    -- Written at once, because it may touch any entry.
    local function refund(state, limit, at)
        local key = state.key
        if state.is_settled then change(state, state.change or 'looked at') end
        if state.change then write(state) end
        states[key] = nil
        if not state.time or not deep().give_back(key, limit, floor(at / limit.tick)) then return end
        local left = load(key, limit)
        if left and left.time then live(key, left.time, limit.window) end
    end

    local function shape(limit)
        if limit.algorithm == 'sliding' and limit.quota > EXACT_QUOTA_MAX then
            limit.tick = ceil_div(limit.window, EXACT_QUOTA_MAX)
        end
        -- An entry since then has said already how long the key lives.
        local can_stand = limit.is_window_fixed and not is_time_given
        limit.said_from = can_stand and floor((now + limit.window) / LIFE_STEP) * LIFE_STEP - limit.window or FOREVER
        if limit.tick == 1 and limit.cost == 1 and limit.is_window_fixed and not limit.count_denied then limit.quick = quick end
    end

    return {
        shape = shape, load = load_charged, serves = serves, fits = fits, peek = peek, admit = admit, refuse = refuse,
        refund = refund, grow = grow, shrink = shrink,
    }
end

-- ── pair: sliding-counter, fixed-window ──────────────────────────────────────────────────────────────
local function new_pair()
    local NEVER, QUOTA_MAX = -1, 10000000
    local pair = {}

    function pair.shape(limit) limit.weighs_previous = limit.algorithm == 'sliding-counter' end

    local function advance(state, window, quota)
        local start = now - now % window
        if state.start > start then
            local sum = state.current + state.previous
            return start, sum < quota and sum or quota, 0
        elseif state.start == start then
            return start, state.current, state.previous
        elseif state.start + window == start then
            return start, 0, state.current
        end
        return start, 0, 0
    end

    local function parts_of(window)
        local part = ceil_div(window, 1048576)
        return part, ceil_div(window, part)
    end

    local function estimate(limit, window, start, current, previous)
        if not limit.weighs_previous or previous == 0 then return current end
        local part, parts = parts_of(window)
        local weight = parts - floor((now - start) / part)
        return current + ceil_div(previous * weight, parts)
    end

    -- The state as it stands now under this limit, kept beside what was read: a peek writes nothing.
    local function view(state, limit)
        if state.viewed == limit then return end
        local window = limit.window
        local start, current, previous
        if state.window == window or state.window == 0 then
            start, current, previous = advance(state, window, limit.quota)
        else
            local used = estimate(limit, state.window, advance(state, state.window, limit.quota))
            start, current, previous = now - now % window, used < limit.quota and used or limit.quota, 0
        end
        state.viewed, state.v_start, state.v_current, state.v_previous = limit, start, current, previous
    end

    local function used_of(state, limit)
        return estimate(limit, limit.window, state.v_start, state.v_current, state.v_previous)
    end

    local function keep(state, limit)
        state.start, state.window = state.v_start, limit.window
        state.current, state.previous = state.v_current, state.v_previous
        -- Also a fixed window's: the rule may change to a sliding counter, to which it is the previous one.
        local windows = state.current > 0 and 2 or 1
        state.lives_for = state.start + windows * limit.window - now
        change(state, 'written')
    end

    function pair.load(key, limit)
        local text = try('GET', key)
        if not text then return { limit = limit, key = key, change = false, start = 0, window = 0, current = 0, previous = 0 } end
        if text.err then return nil, unreadable(text) end
        local start, window, current, previous = match(text, '^(%d+) (%d+) (%d+) (%d+)$')
        start, window, current, previous = whole_of(start), whole_of(window), whole_of(current), whole_of(previous)
        if not (start and window and current and previous) or window == 0
            or current > QUOTA_MAX or previous > QUOTA_MAX then
            return nil, 'TOLLGATE_FOREIGN the string is not start, window, current, previous'
        end
        return { limit = limit, key = key, change = false, start = start, window = window, current = current, previous = previous }
    end

    function pair.serves() return true end

    function pair.fits(state, limit, cost)
        view(state, limit)
        return used_of(state, limit) + cost <= limit.quota
    end

    function pair.wait(state, limit, cost)
        view(state, limit)
        local quota, window = limit.quota, limit.window
        if cost > quota then return NEVER end
        local start, current, previous = state.v_start, state.v_current, state.v_previous
        if used_of(state, limit) + cost <= quota then return 0 end
        if not limit.weighs_previous then return start + window - now end
        local part, parts = parts_of(window)
        local room = quota - cost - current
        if room >= 0 and previous > 0 then
            local offset = (parts - floor(room * parts / previous)) * part
            if offset < window then return start + offset - now end
        end
        local offset = 0
        if current > 0 then
            local first_part = parts - floor((quota - cost) * parts / current)
            offset = first_part > 0 and first_part * part or 0
        end
        return start + window + (offset < window and offset or window) - now
    end

    function pair.peek(state, limit) return pair.wait(state, limit, 1), pair.report(state, limit) end

    function pair.admit(state, limit, cost)
        view(state, limit)
        state.v_current = state.v_current + cost
        keep(state, limit)
        return 0, pair.report(state, limit)
    end

    function pair.refuse(state, limit, cost)
        view(state, limit)
        -- Re-bucketed anew at every look, a changed window would move the moment told away as it is approached.
        local must_keep = state.start > now or state.window > 0 and state.window ~= limit.window
        if limit.count_denied then
            local charged = state.v_current + cost
            if charged > limit.quota then charged = limit.quota end
            if charged > state.v_current then state.v_current = charged end
        end
        if must_keep or limit.count_denied then keep(state, limit) end
        return pair.wait(state, limit, cost), pair.report(state, limit)
    end

    function pair.reset_after(state, limit)
        local windows = 0
        if state.v_current > 0 then
            windows = limit.weighs_previous and 2 or 1
        elseif limit.weighs_previous and state.v_previous > 0 then
            windows = 1
        end
        return windows > 0 and state.v_start + windows * limit.window - now or 0
    end

    function pair.report(state, limit)
        view(state, limit)
        local remaining = limit.quota - used_of(state, limit)
        if remaining < 0 then remaining = 0 end
        local next_after = remaining == limit.quota and 0 or pair.wait(state, limit, remaining + 1)
        return remaining, next_after, pair.reset_after(state, limit)
    end

    function pair.refund(state, limit, at)
        view(state, limit)
        local charged_start, cost = at - at % limit.window, limit.cost
        if charged_start == state.v_start then
            state.v_current = state.v_current - (cost < state.v_current and cost or state.v_current)
        elseif charged_start + limit.window == state.v_start then
            state.v_previous = state.v_previous - (cost < state.v_previous and cost or state.v_previous)
        end
        keep(state, limit)
    end

    function pair.grow(state)
        if state.current + state.previous == 0 then return end
        local text = format('%.0f %.0f %.0f %.0f', state.start, state.window, state.current, state.previous)
        call('SET', state.key, text, 'PX', ttl_of(state.lives_for))
    end

    function pair.shrink(state)
        if state.current + state.previous == 0 then call('DEL', state.key) end
    end

    return pair
end

-- ── bucket: token-bucket, leaky-bucket ───────────────────────────────────────────────────────────────
local function new_bucket()
    local NEVER, WAIT_MAX = -1, 2 ^ 52 - 1
    local bucket = {}

    function bucket.shape(limit, capacity)
        limit.cost_max, limit.spaces = capacity, limit.algorithm == 'leaky-bucket'
        limit.capacity = limit.spaces and capacity + 1 or capacity
        limit.grain = floor(limit.capacity * ceil_div(limit.window, 1048576) / 8500000000) + 1
        limit.parts = ceil_div(limit.window, limit.grain)
    end

    local function view(state, limit)
        if state.viewed == limit then return end
        local level, scale, full = state.level, state.scale, limit.capacity * limit.parts
        if scale ~= limit.parts and scale > 0 then
            local units = ceil_div(level, scale)
            level = (units < limit.capacity and units or limit.capacity) * limit.parts
        end
        if level > full then level = full end
        local time = state.time < now and state.time or now
        local grains = floor(now / limit.grain) - floor(time / limit.grain)
        level = grains >= ceil_div(level, limit.quota) and 0 or level - grains * limit.quota
        state.viewed, state.v_level = limit, level
    end

    local function until_leaked(limit, parts)
        if parts <= 0 then return 0 end
        local grain, grains = limit.grain, ceil_div(parts, limit.quota)
        if grains > floor(WAIT_MAX / grain) + 1 then return WAIT_MAX end
        local wait = grains * grain - now % grain
        return wait < WAIT_MAX and wait or WAIT_MAX
    end

    local function keep(state, limit)
        state.time, state.level, state.scale = now, state.v_level, limit.parts
        state.reset_after = until_leaked(limit, state.v_level)
        change(state, 'written')
    end

    function bucket.load(key, limit)
        local text = try('GET', key)
        if not text then return { limit = limit, key = key, change = false, time = 0, level = 0, scale = 0 } end
        if text.err then return nil, unreadable(text) end
        local time, level, scale = match(text, '^(%d+) (%d+) (%d+)$')
        time, level, scale = whole_of(time), whole_of(level), whole_of(scale)
        if not (time and level and scale) or scale < 1 then return nil, 'TOLLGATE_FOREIGN the string is not time, level, scale' end
        return { limit = limit, key = key, change = false, time = time, level = level, scale = scale }
    end

    function bucket.serves() return true end

    function bucket.fits(state, limit, cost)
        view(state, limit)
        return cost <= limit.cost_max and state.v_level <= (limit.capacity - cost) * limit.parts
    end

    function bucket.wait(state, limit, cost)
        view(state, limit)
        if cost > limit.cost_max then return NEVER end
        if limit.spaces and bucket.fits(state, limit, cost) then return until_leaked(limit, state.v_level) end
        return until_leaked(limit, state.v_level - (limit.capacity - cost) * limit.parts)
    end

    function bucket.peek(state, limit) return bucket.wait(state, limit, 1), bucket.report(state, limit) end

    function bucket.admit(state, limit, cost)
        view(state, limit)
        local turn = limit.spaces and until_leaked(limit, state.v_level) or 0
        state.v_level = state.v_level + cost * limit.parts
        keep(state, limit)
        return turn, bucket.report(state, limit)
    end

    function bucket.refuse(state, limit, cost)
        view(state, limit)
        local has_gone_back = state.time > now
        if limit.count_denied then
            local full = limit.capacity * limit.parts
            local level = state.v_level + (cost < limit.capacity and cost or limit.capacity) * limit.parts
            state.v_level = level < full and level or full
        end
        if has_gone_back or limit.count_denied then
            keep(state, limit)
        elseif state.v_level > 0 then
            -- It may leak more slowly than when it was written, and must live until it is empty. It may leak more quickly
            -- too, but not for whoever wrote it.
            local reset_after = until_leaked(limit, state.v_level)
            if not state.change or reset_after > state.reset_after then state.reset_after = reset_after end
            change(state, state.change or 'looked at')
        end
        return bucket.wait(state, limit, cost), bucket.report(state, limit)
    end

    function bucket.report(state, limit)
        view(state, limit)
        local level, parts = state.v_level, limit.parts
        local remaining = floor((limit.capacity * parts - level) / parts)
        local next_after = 0
        if remaining < limit.cost_max then
            next_after = until_leaked(limit, level - (limit.capacity - remaining - 1) * parts)
        else
            remaining = limit.cost_max
        end
        return remaining, next_after, until_leaked(limit, level)
    end

    function bucket.refund(state, limit, at, reset_after)
        view(state, limit)
        local units = limit.cost < limit.capacity and limit.cost or limit.capacity
        local grain, charged = limit.grain, units * limit.parts
        local lasted = floor((at + reset_after) / grain) - floor(at / grain)
        local passed = floor(now / grain) - floor(at / grain)
        local left = lasted - (passed > 0 and passed or 0)
        local given = 0
        if left > 0 then given = left < ceil_div(charged, limit.quota) and left * limit.quota or charged end
        state.v_level = given < state.v_level and state.v_level - given or 0
        keep(state, limit)
    end

    function bucket.grow(state)
        if state.reset_after == 0 or state.change == 'looked at' then return end
        local text = format('%.0f %.0f %.0f', state.time, state.level, state.scale)
        call('SET', state.key, text, 'PX', ttl_of(state.reset_after))
    end

    function bucket.shrink(state)
        if state.reset_after == 0 then
            call('DEL', state.key)
        elseif state.change == 'looked at' then
            call('PEXPIRE', state.key, ttl_of(state.reset_after), 'GT')
        end
    end

    return bucket
end

-- ── limits ───────────────────────────────────────────────────────────────────────────────────────────

-- A state machine is made when the first limit of the call needs it.
local makers = {
    ['sliding'] = new_log, ['sliding-log'] = new_log,
    ['sliding-counter'] = new_pair, ['fixed-window'] = new_pair,
    ['token-bucket'] = new_bucket, ['leaky-bucket'] = new_bucket,
}
-- By line: most lines of a batch are the same text. And by maker: its state machine.
local limits = {}

local function limit_of(text)
    if limits[text] then return limits[text] end
    local algorithm, quota, window, cost, options = match(text or '', '^(%S+) (%d+) (%d+) (%d+)(.*)$')
    local maker, quota_max = makers[algorithm], algorithm == 'sliding-log' and 100000 or 10000000
    if not maker then fail('TOLLGATE_ARGUMENT a limit line is ALGORITHM QUOTA WINDOW_US COST and options') end
    quota, window, cost = whole_of(quota), whole_of(window), whole_of(cost)
    if not quota or quota < 1 or quota > quota_max then
        fail(format('TOLLGATE_ARGUMENT a quota of %s is 1 to %d', algorithm, quota_max))
    elseif not window or window < 1000 or window > 34560000000000 then
        fail('TOLLGATE_ARGUMENT a window is 1000 to 34560000000000 microseconds')
    elseif not cost or cost >= 2 ^ 32 then
        fail('TOLLGATE_ARGUMENT a cost is 0 to 4294967295')
    end
    local machine = limits[maker] or maker()
    local limit = {
        machine = machine, algorithm = algorithm, quota = quota, window = window, cost = cost, tick = 1, said_from = 0, quick = false,
        is_window_fixed = options == ' window=fixed', count_denied = false,
    }
    local capacity = quota
    for option in string.gmatch(limit.is_window_fixed and '' or options, '%S+') do
        local name, value = match(option, '^(%S+)=(%w+)$')
        local number = whole_of(value)
        if option == 'window=fixed' then
            limit.is_window_fixed = true
        elseif name == 'count_denied' and (number == 0 or number == 1) then
            limit.count_denied = number == 1
        elseif (name == 'burst' and algorithm == 'token-bucket' or name == 'queue' and algorithm == 'leaky-bucket')
            and number and number >= 1 and number <= 10000000 then
            capacity = number
        else
            fail('TOLLGATE_ARGUMENT options are burst= (token-bucket) and queue= (leaky-bucket), 1 to 10000000, count_denied=1, window=fixed')
        end
    end
    machine.shape(limit, capacity)
    limits[maker], limits[text] = machine, limit
    return limit
end

-- The state of the next key for this limit. The problem instead, if the key holds something else.
local key_at = 0
local function next_state(limit)
    key_at = key_at + 1
    local key = KEYS[key_at]
    local state = states[key]
    if state then
        local machine = limit.machine
        if state.limit == limit then return state end
        if state.limit.machine ~= machine then return nil, 'TOLLGATE_FOREIGN one key is used by limits of different kinds' end
        if machine.serves(state, limit) then return state end
        -- Two windows on one counter in one call: the second reads what the first has left.
        if state.change then write(state) end
    elseif not key then
        fail('TOLLGATE_ARGUMENT there are fewer keys than limits')
    end
    local problem
    state, problem = limit.machine.load(key, limit)
    states[key] = state
    return state, problem
end

-- ── the steps ────────────────────────────────────────────────────────────────────────────────────────

local arg_at, arg_count, steps = 1, #ARGV, 0

-- A check of one limit.
local function check_one(limit, repeats)
    local head = reply_count + 1
    if limit.quick and repeats == 1 then
        local key = KEYS[key_at + 1]
        if key and not states[key] and limit.quick(key, limit, head) then
            reply_count, key_at = head + 5, key_at + 1
            return
        end
    end
    local state, problem = next_state(limit)
    local machine, cost = limit.machine, limit.cost
    reply_count = head
    if problem then
        reply[head] = { err = problem }
        return
    end
    local at, results, may_change = head, 0, nil
    repeat
        if cost > 0 and machine.fits(state, limit, cost) then
            reply[at + 1] = 1
            reply[at + 3], reply[at + 2], reply[at + 4], reply[at + 5] = machine.admit(state, limit, cost)
            may_change = true
        elseif cost > 0 then
            reply[at + 1] = 0
            reply[at + 3], reply[at + 2], reply[at + 4], reply[at + 5] = machine.refuse(state, limit, cost)
            may_change = limit.count_denied
        else
            reply[at + 1] = 1
            reply[at + 3], reply[at + 2], reply[at + 4], reply[at + 5] = machine.peek(state, limit)
        end
        at, results = at + 5, results + 1
    until not may_change or results >= repeats
    reply[head], reply_count = results, at
end

-- Steps that begin with a head. Returned is what finds the step for a head.
local function new_steps()
    local NOT_BOTH = 'TOLLGATE_ARGUMENT a call holds checks or refunds, not both'

    -- In which step each key was named last.
    local named_in = {}

    -- Like next_state, where a step has several limits. Each must have a counter of its own: all are looked at before any is
    -- charged, so of two on one counter the second would not see what the first takes.
    local function next_own_state(limit)
        local key = KEYS[key_at + 1]
        if key then
            if named_in[key] == steps then fail('TOLLGATE_ARGUMENT a key stands once in a check or refund') end
            named_in[key] = steps
        end
        return next_state(limit)
    end

    -- A check of several limits: all are looked at before any is charged.
    local function check_several(count, repeats)
        local head, line_limits, line_states, problem = reply_count + 1, {}, {}, nil
        reply_count = head
        for j = 1, count do
            local trouble
            line_limits[j] = limit_of(ARGV[arg_at + j])
            line_states[j], trouble = next_own_state(line_limits[j])
            problem = problem or trouble
        end
        arg_at = arg_at + count
        if problem then
            reply[head] = { err = problem }
            return
        end
        local at, results, may_change = head, 0, false
        repeat
            local is_admitted = true
            may_change = false
            for j = 1, count do
                local limit = line_limits[j]
                local fits = limit.cost == 0 or limit.machine.fits(line_states[j], limit, limit.cost)
                reply[at + 5 * j - 4], is_admitted = fits and 1 or 0, is_admitted and fits
            end
            for j = 1, count do
                local limit, state = line_limits[j], line_states[j]
                local machine, cost, decide = limit.machine, limit.cost, nil
                if cost == 0 then
                    decide = machine.peek
                elseif is_admitted then
                    decide, may_change = machine.admit, true
                else
                    decide, may_change = machine.refuse, may_change or limit.count_denied
                end
                reply[at + 3], reply[at + 2], reply[at + 4], reply[at + 5] = decide(state, limit, cost)
                at = at + 5
            end
            results = results + 1
        until not may_change or results >= repeats
        reply[head], reply_count = results, at
    end

    -- The longest ban among the next `count` keys in microseconds, or nothing.
    local function banned_for(count)
        local longest
        for _ = 1, count do
            key_at = key_at + 1
            local ms = call('PTTL', KEYS[key_at])
            if ms == -1 then
                longest = -1
            elseif ms >= 0 and longest ~= -1 and ms * 1000 >= (longest or 0) then
                longest = ms * 1000
            end
        end
        return longest
    end

    local function check(head)
        local ban = head.bans > 0 and banned_for(head.bans)
        if ban then
            key_at, arg_at = key_at + head.count, arg_at + head.count
            reply[reply_count + 1], reply[reply_count + 2], reply_count = 0, ban, reply_count + 2
        elseif head.count == 1 then
            arg_at = arg_at + 1
            check_one(limit_of(ARGV[arg_at]), head.repeats)
        else
            check_several(head.count, head.repeats)
        end
    end

    local function refund(head)
        local lines, problem = {}, nil
        for j = 1, head.count do
            local limit = limit_of(ARGV[arg_at + 1])
            local state, trouble = next_own_state(limit)
            local at, reset_after = match(ARGV[arg_at + 2] or '', '^(%d+) (%d+)$')
            at, reset_after = whole_of(at), whole_of(reset_after)
            if not at or not reset_after then fail('TOLLGATE_ARGUMENT a receipt is AT RESET_AFTER in microseconds') end
            problem, arg_at = problem or trouble, arg_at + 2
            lines[j] = { limit = limit, state = state, at = at, reset_after = reset_after }
        end
        -- A head is asked when it is read; a check may have none.
        if arg_at < arg_count and not match(ARGV[arg_at + 1], '^refund ') then fail(NOT_BOTH) end
        reply_count = reply_count + 1
        reply[reply_count] = problem and { err = problem } or 1
        for j = 1, problem and 0 or head.count do
            local line = lines[j]
            if line.limit.cost > 0 then line.limit.machine.refund(line.state, line.limit, line.at, line.reset_after) end
        end
    end

    local heads, first_verb = {}, nil
    local function head_of(text)
        local head = heads[text]
        if head then return head end
        local verb, count, bans, repeats = match(text, '^([cr]%a+) (%d+) ?(%d*) ?(%d*)$')
        count = tonumber(count)
        bans, repeats = tonumber(bans) or 0, tonumber(repeats) or 1
        if not count or count < 1 or repeats < 1 or repeats > 1000 or verb ~= 'check' and verb ~= 'refund' then
            fail('TOLLGATE_ARGUMENT a step is a limit line, check LIMITS [BANS [REPEAT]] with a REPEAT of 1 to 1000, or refund LIMITS')
        end
        head = { run = verb == 'check' and check or refund, count = count, bans = bans, repeats = repeats }
        -- What stood before the first head were checks.
        first_verb = first_verb or steps > 1 and 'check' or verb
        if verb ~= first_verb then fail(NOT_BOTH) end
        heads[text] = head
        return head
    end

    return head_of
end

local head_of
local function run()
    while arg_at < arg_count do
        arg_at, steps = arg_at + 1, steps + 1
        local text = ARGV[arg_at]
        local limit = limits[text]
        if not limit and match(text, '^[cr]') then
            head_of = head_of or new_steps()
            local head = head_of(text)
            head.run(head)
        else
            check_one(limit or limit_of(text), 1)
        end
    end
end

-- Nothing has been written yet, whatever happens here, unless `has_written` says so.
local is_done, problem = pcall(run)
if not is_done then
    local text = type(problem) == 'table' and problem.err or problem
    if match(text, 'attempt to perform arithmetic') then text = 'TOLLGATE_FOREIGN a list holds something else than numbers' end
    if has_written then text = 'TOLLGATE_PARTLY ' .. text end
    return { err = match(text, '^%u[%u_]+ ') and text or 'ERR ' .. text }
end

if write_quick then write_quick() end
for i = 1, changed_count do
    local state = changed[i]
    if state.change then state.limit.machine.grow(state) end
end
for i = 1, changed_count do
    local state = changed[i]
    if state.change then state.limit.machine.shrink(state) end
end

if steps == 1 and type(reply[2]) == 'table' then return reply[2] end
return reply
