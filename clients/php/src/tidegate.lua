--[==[ Tidegate: decide, charge and refund, in one call, by the server's clock.

A rate limit that several nodes share is a counter that several nodes read, judge and change. If one of them
read first and wrote later, two nodes could both admit a request on the same last unit. So the whole decision
runs here, where no other command comes between: all limits of a request, all or nothing. The call itself costs
Redis more than the arithmetic, so one call may carry many checks. They are decided in order, as if each were a
call of its own.

    read ──▶ decide in memory, check after check ──▶ write what has changed
             (a counter is read once a call)          first what grows, then what shrinks

Writing last has three reasons. A counter that ten checks of a batch share is read and written once. A key that
holds foreign data is found before anything is written. And Redis compares its memory with `maxmemory` only before
the first write of a script, and only if that command can grow (RPUSH, LSET, SET): a script that began by trimming
could then grow without a check. So what grows is written first, and a server that is out of memory rejects the
call as a whole.

KEYS
    for each step its ban keys or the key of its block of receipts, then one key per limit, in the order of the steps. In a Cluster all of
    them must be in one slot. A call of checks may instead have no KEYS, and `keys N` and N keys before ARGV[1]: these may
    be in any slots that the node owns. If it does not own one, or a key has left with a slot that is being moved, the
    call fails with an error of the server that contains `access a non local key`. Nothing was written then, because all
    keys are read before the first write.

ARGV
    [1]  the time in microseconds since the epoch, for tests; empty for the server's clock. With a time, keys live for
         at least ten minutes, so that they do not expire in real time during a test.
    then for each step either
         a limit line                     a check of that limit
         check LIMITS [BANS [REPEAT]]     a check of LIMITS limits, each with its limit line, after BANS ban keys
           and a line per limit           (default: 0), decided REPEAT times (default: 1; at most 1000), in order
         refund LIMITS                    a refund; for each limit
           and two lines per limit        its limit line, with the cost that was charged, and AT RESET_AFTER [REFUNDED]:
                                          the time of the decision and its reset_after, both in microseconds, and its
                                          refunded (default: 0, with which a bucket may get back less)
         refund LIMITS UNTIL RECEIPT      a redemption: the same, but once per receipt, and only before the time UNTIL in
           and two lines per limit        microseconds. RECEIPT is the number of the receipt in its block, 0 to 1023.
                                          LIMITS may be 0. The second line of a limit may also be the word charge: its
                                          cost is charged, whether it fits or not, and its limit line has
                                          count_denied=1
    A key occurs at most once in a step, so no counter is charged twice by one check.
    A limit line is  ALGORITHM QUOTA WINDOW_US COST [burst=N] [queue=N] [count_denied=1] [window=fixed]
    (window=fixed promises that this key is never used with another window). A call holds checks or refunds, not both.

RETURNS a flat list of integers:
    the time of the decisions in microseconds, then for each step
         check     the number of results, then for each result and each of its limits six numbers:
                   allowed (1 or 0), remaining, retry_after, next_after, reset_after (µs; -1: never), and refunded:
                   the units that had been refunded on a bucket before this charge; else 0. A refund needs it.
                   If there are fewer results than REPEAT, all others are equal to the last.
                   Or 0 and one number: the subject is banned for this many µs (-1: without an end). Nothing was
                   charged.
         refund    1: done. A redemption may also return 0: the receipt is marked, so it was redeemed before; or -1:
                   UNTIL has passed. Nothing was changed then.
    ERRORS: the first word is one of
         TIDEGATE_FOREIGN    a key holds data that this script did not write. In place of a step's count: only this
                             step failed. As the whole reply: nothing was written, and each step may be retried
                             alone.
         TIDEGATE_ARGUMENT   the call is malformed. Nothing was written.
         TIDEGATE_INTERNAL   the script has a bug; the text has the line. Nothing was written.
         TIDEGATE_PARTLY     followed by one of the above, or by an error of the server: earlier steps of the call were
                             already written (refunds, or two windows on one counter). Only a redemption may be
                             retried: it returns 0 if it was written.
    Any other error is the server's.

To delete a counter, DEL its key. A refund of an earlier charge may then give back units of later ones, but no more than
were charged. A ban is any value under its ban key, for as long as the key exists. A used receipt is a bit of its block.
A redemption sets it. The TTL of a block ends at the latest UNTIL of its used receipts.

STATE (docs/redis-state.md documents every byte; every key has a TTL that ends when its state stops to matter)
    log      a list    time time time …              one for each unit, oldest first
                       directory chunk … open chunk   packed, for many units
    pair     a string  start window current previous
    bucket   a string  time level scale              with a fourth number after a refund: the refunded units
    receipts a string  a bit for each of up to 1024 receipts, the first one in the highest bit of the first byte

FAST PATHS. Each decides exactly what the general path decides, with fewer commands or less Lua. tests/suite/fast_paths.rs
runs both on the same calls and compares replies and bytes; `USES_FAST_PATHS = false` is the general path alone.
    quick            one unit against one limit on a plain log from which nothing has left: three reads, no state table
    check_one        a check of one limit, without the tables that several limits need
    known options    the options of nearly all limit lines are not parsed
    oldest entry     the wait for one unit is known without a search
    tick of now      the last entry of the open chunk is joined with the new one without a search
    first chunk      what has left the window is looked for in the first chunk before the directory is read
    plain push       a few units at the end of a plain log are pushed without a plan
    open chunk       an admission that changes only the open chunk of a log rewrites it without a plan
    kept TTL         an admission does not set the TTL again if the one before it has set the same one

TWIN OF tidegate-core/src/algorithm/{log,pair,bucket}.rs. The integers are those of docs/algorithms.md: all
of them below 2^53, which a Lua number holds exactly. Change both or neither.
]==]

local USES_FAST_PATHS = true

local call, try, format, match, floor = redis.call, redis.pcall, string.format, string.match, math.floor

-- Keys before the arguments become KEYS.
local KEYS, ARGV = KEYS, ARGV
if #KEYS == 0 and ARGV[1] then
    local count = tonumber(match(ARGV[1], '^keys (%d+)$'))
    if count and count < #ARGV then
        local keys, arguments = {}, {}
        for i = 1, count do keys[i] = ARGV[i + 1] end
        for i = count + 2, #ARGV do arguments[i - count - 1] = ARGV[i] end
        KEYS, ARGV = keys, arguments
    end
end

-- Redis runs this chunk anew for every call, so each function and each captured local is created again. What few checks
-- need is created by the function that needs it.

-- Formats a whole number. Lua prints 1.76e+15 for a time, and how Redis prints a number depends on its version.
local function text_of(whole) return format('%.0f', whole) end

-- Parses a whole number from 0 to 2^53 - 1. Returns nil for any other text.
local function whole_of(text)
    local number = tonumber(text)
    if number and number >= 0 and number < 2 ^ 53 and number % 1 == 0 then return number end
end

local function ceil_div(a, b) return a > 0 and floor((a - 1) / b) + 1 or 0 end

local function fail(message) error({ err = message }) end

-- Returns the error of a step whose read has failed, or nil if `reply` is no error. Raises errors other than a wrong type.
local function unreadable(reply)
    if not reply.err then return end
    if not match(reply.err, '^WRONGTYPE') then fail(reply.err) end
    return 'TIDEGATE_FOREIGN the key holds another type'
end

local is_time_given = ARGV[1] ~= ''
local now
if is_time_given then
    now = whole_of(ARGV[1])
    if not now or now >= 2 ^ 52 then fail('TIDEGATE_ARGUMENT the time is 0 to 2^52 - 1 microseconds, or empty') end
else
    local time = call('TIME')
    now = time[1] * 1000000 + time[2]
end
local now_text = text_of(now)

-- Converts a reset_after to a TTL in milliseconds. One more than needed: the server may count from the millisecond before
-- `now`.
local function ttl_of(reset_after)
    local ms = ceil_div(reset_after, 1000) + 1
    if is_time_given and ms < 600000 then ms = 600000 end
    return text_of(ms)
end

-- The states that this call has read, by key, and those that must be written, in order.
local states, changed, changed_count = {}, {}, 0

local reply, reply_count = { now }, 1

-- Writes the charges of the fast path `quick`, before all others: these writes only grow. Set by new_log.
local write_quick

-- Marks a state as changed, so that it is written at the end of the call.
local function change(state, how)
    if not state.change then
        changed_count = changed_count + 1
        changed[changed_count] = state
    end
    state.change = how
end

-- Whether something was written before all steps were decided.
local has_written = false

-- The receipt that the current step redeems, until the step writes something: the key of its block, its number in the
-- block, the TTL that the block needs for it, and whether the block exists.
local receipt_key, receipt_number, receipt_ttl, is_block_known

-- Marks the receipt of the current step as used. This is the first write of its step: a step that fails before it has
-- changed nothing, and a server that is out of memory rejects it. Does nothing if there is no receipt to mark.
local function mark_receipt()
    if not receipt_key then return end
    call('SETBIT', receipt_key, receipt_number, '1')
    if is_block_known then
        call('PEXPIRE', receipt_key, receipt_ttl, 'GT')
    else
        call('PEXPIRE', receipt_key, receipt_ttl)
    end
    receipt_key, has_written = nil, true
end

-- Writes a state before the end of the call.
local function write(state)
    local machine = state.limit.machine
    if machine.prepare then machine.prepare(state) end
    mark_receipt()
    machine.grow(state)
    has_written = true
    machine.shrink(state)
    state.change = false
end

-- ── log: sliding, sliding-log ────────────────────────────────────────────────────────────────────────
--
-- Admissions as entries (time, units), oldest first, in a list of one of two forms:
--
--     plain      t t t t t t                            a time for each unit, so the length is the total
--     chunked    directory  chunk  chunk  open chunk    a chunk packs up to CHUNK_ENTRIES_MAX entries
--                or only an open chunk
--
-- A list of up to 500 units is plain: appending to it is one command, everything else is a few. More units, more than
-- four of them at once, or a limit with ticks make it chunked. It is plain again after all entries have left the
-- window. New entries go to the open chunk, whose header holds the totals; when it is full it is closed. The directory
-- holds for each closed chunk the time of its newest entry and the sum of its units. So an entry is found by its time,
-- or by the units before it, without a walk over all entries: one search in the directory and one in a chunk. A refund
-- changes one chunk, the directory and the header, and nothing behind them. Few bytes are handled at a time, because
-- the server's Lua hashes every byte of every string that it creates.
--
-- Both forms are the same to a decision, which counts the units of the list from its front, as they were read:
--
--     1 ······ low ─────── kept of the list ─────── high ·· then the new entry: `units` at now
--     have left or                                      became part of the
--     were removed                                      new entry
--
-- All decisions of a call have the same `now`, so there is one new entry. `units` is false while there is none. The list
-- is written when all steps are decided.
--
-- Nearly every check finds a plain list whose newest entry is in the past, with nothing to drop. The fields of a fresh
-- state and the first branch of each function are made for it.

local function new_log()
    local NEVER, FOREVER, EXACT_QUOTA_MAX, PLAIN_UNITS_MAX = -1, math.huge, 1000, 500
    -- The end of a key's life is rounded up to a multiple of 0.9 s. An admission whose life ends in the same step as that of
    -- the one before need not set it again, and no key lives a second too long.
    local LIFE_STEP = 900000
    local NOT_A_LOG = 'TIDEGATE_FOREIGN the list is not a log'

    -- The keys that quick checks have charged, in order, the limit of each, and the keys whose TTL must be set.
    local quick_count, quick_keys, quick_limit_of, renewed_count, renewed_keys = 0, {}, {}, 0, {}

    -- Sets the TTL of a key whose newest entry is at `time`. With `GT` for `if_longer` a TTL is never shortened.
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

    -- Fast path: decides a check of one unit on a plain list that is in order and from which nothing has left. It needs no
    -- state unless the key occurs again. Writes the result into the reply from `at` on. Returns false if the check needs the
    -- general path.
    local function quick(key, limit, at)
        local last_text, left_until = try('LINDEX', key, '-1'), now - limit.window
        -- A time has up to 16 digits, a chunk more bytes, an error none.
        if not last_text or #last_text > 16 or #last_text == 0 or quick_limit_of[key] then return false end
        -- The general path finds out what a text is that is no number.
        local time = tonumber(last_text)
        if not time or not (time < now and time > left_until and time >= 0) then return false end
        local oldest = tonumber(call('LINDEX', key, '0'))
        if not oldest or oldest <= left_until then return false end
        local total, next_after = call('LLEN', key), oldest - left_until
        local room = limit.quota - total
        if room > 0 and total < PLAIN_UNITS_MAX then
            quick_count = quick_count + 1
            quick_keys[quick_count], quick_limit_of[key] = key, limit
            if time < limit.ttl_set_from then
                renewed_count = renewed_count + 1
                renewed_keys[renewed_count] = key
            end
            reply[at], reply[at + 1], reply[at + 2], reply[at + 3] = 1, 1, room - 1, 0
            reply[at + 4], reply[at + 5], reply[at + 6] = next_after, limit.window, 0
            return true
        elseif room == 0 then
            reply[at], reply[at + 1], reply[at + 2], reply[at + 3] = 1, 0, 0, next_after
            reply[at + 4], reply[at + 5], reply[at + 6] = next_after, time - left_until, 0
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

    -- Adds the general path to the state machine. Calls in which all checks are quick do not need it.
    local function add_general_path(machine)
        local OPEN, OPEN_HEADER_BYTES, OPEN_ENTRIES_MAX = 79, 17, 64

        local function is_in_tick_of_now(time, limit) return floor(time / limit.tick) == floor(now / limit.tick) end

        -- Chunked lists.
        local function new_chunked()
            local CHUNK_ENTRIES_MAX, RECORDS_DECODED = 256, 32
            local pack, unpack_from, sub, rep, byte = struct.pack, struct.unpack, string.sub, string.rep, string.byte
            -- The first bytes of a closed chunk and of the directory.
            local C, D = 67, 68
            local many_records

            -- Creates a node: the records of a chunk (time and units of entries), or of the directory (newest time and units of
            -- chunks).
            local function node_of(text, header_bytes)
                local count = (#text - header_bytes) / 10
                if count < 1 or count % 1 ~= 0 then fail(NOT_A_LOG) end
                return { text = text, count = count, at = header_bytes - 9, decoded = 0, sums = false }
            end

            local function time_of(node, index) return (unpack_from('>I7', node.text, node.at + 10 * index)) end

            local function units_of(node, index) return (unpack_from('>I3', node.text, node.at + 10 * index + 7)) end

            local function rows_of(node, from, to) return sub(node.text, node.at + 10 * from, node.at + 10 * to + 9) end

            -- Returns the number of records that are not later than `time`.
            local function count_until(node, time)
                local low, high = 0, node.count
                while low < high do
                    local middle = floor((low + high) / 2) + 1
                    if time_of(node, middle) <= time then low = middle else high = middle - 1 end
                end
                return low
            end

            -- Decodes some more records, and adds their units to `sums`: the units of all records up to each.
            local function decode_more(node)
                local decoded, sums, count, layout = node.decoded, node.sums, RECORDS_DECODED, many_records
                if decoded + count > node.count then
                    count = node.count - decoded
                    layout = '>' .. rep('I7I3', count)
                elseif not layout then
                    many_records = '>' .. rep('I7I3', count)
                    layout = many_records
                end
                local values, sum = { unpack_from(layout, node.text, node.at + 10 * decoded + 10) }, sums[decoded]
                for i = 1, count do
                    sum = sum + values[2 * i]
                    sums[decoded + i] = sum
                end
                node.decoded = decoded + count
            end

            local function sum_until(node, index)
                if index == 0 then return 0 end
                node.sums = node.sums or { [0] = 0 }
                while node.decoded < index do decode_more(node) end
                return node.sums[index]
            end

            -- Returns the index of the record that holds the unit with this number.
            local function record_at(node, unit)
                local sums = node.sums or { [0] = 0 }
                node.sums = sums
                while sums[node.decoded] < unit do
                    if node.decoded == node.count then fail(NOT_A_LOG) end
                    decode_more(node)
                end
                local low, high = 1, node.decoded
                while low < high do
                    local middle = floor((low + high) / 2)
                    if sums[middle] < unit then low = middle + 1 else high = middle end
                end
                return low
            end

            local function directory_of(tree)
                if not tree.directory then
                    local text = call('LINDEX', tree.key, '0')
                    if byte(text) ~= D then fail(NOT_A_LOG) end
                    tree.directory = node_of(text, 1)
                    if call('LLEN', tree.key) ~= tree.directory.count + 2 then fail(NOT_A_LOG) end
                end
                return tree.directory
            end

            -- Returns a closed chunk. The tree caches the chunks that were read, by their index.
            local function chunk_at(tree, index)
                local chunk = tree[index]
                if chunk then return chunk end
                local text = call('LINDEX', tree.key, text_of(index))
                if not text or byte(text) ~= C then fail(NOT_A_LOG) end
                chunk = node_of(text, 1)
                if tree.directory and time_of(chunk, chunk.count) ~= time_of(tree.directory, index) then fail(NOT_A_LOG) end
                tree[index] = chunk
                return chunk
            end

            -- Returns the entries of a chunk up to `to`, packed, without its first `left` units, and their number.
            local function rows_after(chunk, left, to)
                if left == 0 then return rows_of(chunk, 1, to), to end
                local from = record_at(chunk, left + 1)
                local head = pack('>I7I3', time_of(chunk, from), sum_until(chunk, from) - left)
                return head .. rows_of(chunk, from + 1, to), to - from + 1
            end

            local function open_text(oldest, total, closed, left, rows)
                return pack('>c1I7I3I3I3', 'O', oldest, total, closed, left) .. rows
            end

            local chunked = {}

            -- Returns the number of units in entries that are not later than `time`, the time of the next entry in that chunk
            -- (false if there is none), and whether that chunk is the first one.
            function chunked.units_until(state, time)
                local tree = state.tree
                local chunk, before = tree, tree.left + tree.closed
                if tree.closed > 0 and time_of(chunk, 1) > time then
                    -- Fast path: what leaves is mostly in the first chunk.
                    chunk, before = chunk_at(tree, 1), 0
                    if not USES_FAST_PATHS or time_of(chunk, chunk.count) <= time then
                        local directory = directory_of(tree)
                        local index = count_until(directory, time)
                        before = sum_until(directory, index)
                        chunk = index < directory.count and chunk_at(tree, index + 1) or tree
                    end
                end
                local entry = count_until(chunk, time)
                return before + sum_until(chunk, entry), entry < chunk.count and time_of(chunk, entry + 1), before == 0
            end

            -- Returns the time of the entry that holds the unit with this number.
            function chunked.time_at(state, unit)
                local tree = state.tree
                local chunk, before = tree, tree.left + tree.closed
                if unit <= before then
                    local directory = directory_of(tree)
                    local index = record_at(directory, unit)
                    chunk, before = chunk_at(tree, index), sum_until(directory, index - 1)
                end
                return time_of(chunk, record_at(chunk, unit - before))
            end

            -- Finds the last entry that stays as it is: not later than now, and not in now's tick. The entries behind it become
            -- part of the new entry. Returns the number of units up to it. Sets `cut_chunk` (0 if nothing stays, nil for the
            -- open chunk) and `cut_entry` of the state.
            function chunked.cut(state, limit)
                local tree = state.tree
                local open, before = tree, tree.left + tree.closed
                if tree.closed == 0 or time_of(open, 1) <= now then
                    local entry = count_until(open, now)
                    if entry > 0 and is_in_tick_of_now(time_of(open, entry), limit) then entry = entry - 1 end
                    state.cut_entry = entry
                    return before + sum_until(open, entry)
                end
                local directory = directory_of(tree)
                local index = count_until(directory, now) + 1
                local entry = index <= directory.count and count_until(chunk_at(tree, index), now) or 0
                local is_merged = false
                repeat
                    if entry == 0 then
                        index = index - 1
                        if index == 0 then break end
                        entry = chunk_at(tree, index).count
                    end
                    if is_merged or not is_in_tick_of_now(time_of(chunk_at(tree, index), entry), limit) then break end
                    entry, is_merged = entry - 1, true
                until false
                state.cut_chunk, state.cut_entry = index, entry
                return index > 0 and sum_until(directory, index - 1) + sum_until(chunk_at(tree, index), entry) or 0
            end

            -- Plans the write of a chunked list of which something stays: `sets` by index, a directory to push in front,
            -- `pushes` at the end, and which elements to keep.
            function chunked.plan(state)
                local tree, low, own, cut = state.tree, state.low, state.units, state.cut_chunk
                local sets, pushes = {}, {}
                state.sets, state.pushes = sets, pushes

                -- The closed chunks that stay are those from `first` to the one before the chunk that will be open.
                local first, left, before, last = 1, low, 0, nil
                local source, is_open_alone = tree, false
                if tree.closed == 0 then
                    is_open_alone = true
                elseif low >= tree.left + tree.closed then
                    left, before, is_open_alone = low - tree.left - tree.closed, tree.left + tree.closed, true
                else
                    if low ~= tree.left and not state.is_low_in_first then
                        local directory = directory_of(tree)
                        first = record_at(directory, low + 1)
                        left = low - sum_until(directory, first - 1)
                    end
                    before = tree.left + tree.closed
                    if cut then
                        source, before = chunk_at(tree, cut), sum_until(tree.directory, cut - 1)
                        is_open_alone, last = cut == first, cut - 1
                    end
                end

                local rows, count = rows_after(source, is_open_alone and left or 0, state.cut_entry or source.count)
                local open_units = state.high - (before > low and before or low)
                local closing, closing_units
                if own then
                    if count >= OPEN_ENTRIES_MAX then
                        closing, closing_units, rows, open_units = rows, open_units, '', 0
                    end
                    rows, open_units = rows .. pack('>I7I3', now, own), open_units + own
                end
                if is_open_alone then left = 0 end
                local open = open_text(state.oldest, state.total, state.total - open_units, left, rows)

                if tree.closed == 0 then
                    sets[0] = closing and 'C' .. closing or open
                    if closing then
                        state.front, pushes[1] = 'D' .. sub(closing, -10, -4) .. pack('>I3', closing_units), open
                    end
                elseif first == 1 and not cut and not closing and not is_open_alone then
                    sets[-1] = open
                elseif is_open_alone and not closing then
                    sets[-1], state.keep_from, state.keep_to = open, -1, -1
                else
                    local directory = directory_of(tree)
                    local count_before = directory.count
                    last = last or count_before
                    if is_open_alone then first = last + 1 end
                    local joined = closing and last >= first and chunk_at(tree, last)
                    if joined and joined.count + count <= CHUNK_ENTRIES_MAX then
                        closing = rows_of(joined, 1, joined.count) .. closing
                        closing_units, last = closing_units + units_of(directory, last), last - 1
                    end
                    local records, index = rows_of(directory, first, last), last + 1
                    local function put(text)
                        if index <= count_before + 1 then sets[index] = text else pushes[#pushes + 1] = text end
                        index = index + 1
                    end
                    if closing then
                        records = records .. sub(closing, -10, -4) .. pack('>I3', closing_units)
                        put('C' .. closing)
                    end
                    put(open)
                    -- In place of the last element that is dropped, so that the list need not grow to hold it.
                    sets[first - 1] = 'D' .. records
                    if first > 1 or index <= count_before + 1 then state.keep_from, state.keep_to = first - 1, index - 1 end
                end
            end

            -- Plans a chunked list that replaces the present list: the times of a plain list (`items`), and the new entry.
            function chunked.plan_anew(state, items)
                -- Times and units in turn.
                local values, count = {}, 0
                for i = 1, #items do
                    if items[i] == items[i - 1] then
                        values[count] = values[count] + 1
                    else
                        values[count + 1], values[count + 2], count = tonumber(items[i]) or fail(NOT_A_LOG), 1, count + 2
                    end
                end
                values[count + 1], values[count + 2], count = now, state.units, count + 2
                local elements, records, closed = { '' }, '', 0
                for from = 1, count, 2 * CHUNK_ENTRIES_MAX do
                    local to, sum = from + 2 * CHUNK_ENTRIES_MAX - 1, 0
                    local is_open = to >= count
                    if is_open then to = count end
                    local rows = pack('>' .. rep('I7I3', (to - from + 1) / 2), unpack(values, from, to))
                    if is_open then
                        elements[#elements + 1] = open_text(state.oldest, state.total, closed, 0, rows)
                    else
                        for i = from + 1, to, 2 do sum = sum + values[i] end
                        closed, records = closed + sum, records .. pack('>I7I3', values[to - 1], sum)
                        elements[#elements + 1] = 'C' .. rows
                    end
                end
                if closed > 0 then elements[1] = 'D' .. records else table.remove(elements, 1) end
                state.sets, state.pushes = {}, elements
                if not state.is_new then state.keep_from, state.keep_to = -#elements, -1 end
            end

            -- Deletes an element of a list, searching from the nearer end.
            local function delete(key, index, count)
                call('LSET', key, text_of(index), '')
                call('LREM', key, index * 2 > count and '-1' or '1', '')
            end

            -- Finds the newest entry of a tick. Returns its chunk, its index there, and the index of the chunk (nil for the open
            -- one); nothing if the tick has no entry.
            local function entry_of(state, limit, tick)
                local tree, until_time, index = state.tree, (tick + 1) * limit.tick - 1, nil
                local chunk = tree
                local entry = count_until(chunk, until_time)
                if entry == 0 and tree.closed > 0 then
                    local directory = directory_of(tree)
                    index = count_until(directory, until_time) + 1
                    entry = index <= directory.count and count_until(chunk_at(tree, index), until_time) or 0
                    if entry == 0 then
                        index = index - 1
                        entry = index > 0 and chunk_at(tree, index).count or 0
                    end
                    chunk = entry > 0 and chunk_at(tree, index)
                end
                if entry > 0 and floor(time_of(chunk, entry) / limit.tick) == tick then return chunk, entry, index end
            end

            -- Returns the entries of a chunk, packed, with `taken` units less in one of them. An entry without units is dropped.
            local function rows_without(chunk, entry, taken)
                local time, units = unpack_from('>I7I3', chunk.text, chunk.at + 10 * entry)
                local row = units > taken and pack('>I7I3', time, units - taken) or ''
                return rows_of(chunk, 1, entry - 1) .. row .. rows_of(chunk, entry + 1, chunk.count)
            end

            -- Takes up to the limit's cost from the newest entry of a tick. The TTL is set first: a server that is out of memory
            -- accepts that command, and then the writes that follow it. Two neighbouring closed chunks that fit into one are
            -- joined, so that there are never many small ones.
            function chunked.give_back(state, limit, tick, live)
                local key, tree, oldest = state.key, state.tree, state.oldest
                local closed, left = tree.closed, tree.left
                local chunk, entry, index = entry_of(state, limit, tick)
                if index == 1 and left > 0 then
                    -- Drop what has left this chunk.
                    local rows, count = rows_after(chunk, left, chunk.count)
                    entry = entry - (chunk.count - count)
                    if entry < 1 then chunk = nil else chunk = node_of('C' .. rows, 1) end
                end
                mark_receipt()
                if not chunk then return live(key, state.time, limit.window) end
                local units = units_of(chunk, entry)
                local taken = units < limit.cost and units or limit.cost
                local total = state.total - taken
                has_written = true
                if total <= 0 then return call('DEL', key) end
                local rows = rows_without(chunk, entry, taken)
                local is_first = entry == 1 and taken == units and (index == 1 or not index and closed == 0)

                if not index and #rows > 0 then
                    if is_first then oldest = time_of(chunk, 2) end
                    live(key, (unpack_from('>I7', rows, #rows - 9)), limit.window)
                    return call('LSET', key, '-1', open_text(oldest, total, closed, left, rows))
                end

                local directory = directory_of(tree)
                local count = directory.count
                if not index then
                    -- The open chunk is empty: the last closed one takes its place.
                    local last = chunk_at(tree, count)
                    local left_in_last = count == 1 and left or 0
                    closed, rows = closed - (units_of(directory, count) - left_in_last), rows_after(last, left_in_last, last.count)
                    live(key, time_of(directory, count), limit.window)
                    call('LSET', key, '-1', open_text(oldest, total, closed, count > 1 and left or 0, rows))
                    if count == 1 then return call('LTRIM', key, '-1', '-1') end
                    call('LSET', key, '0', 'D' .. rows_of(directory, 1, count - 1))
                    return delete(key, count, count)
                end

                closed = closed - taken
                if is_first then
                    oldest = time_of(chunk.count > 1 and chunk or count > 1 and chunk_at(tree, 2) or tree, chunk.count > 1 and 2 or 1)
                end
                local sum = units_of(directory, index) - taken
                if index == 1 then sum, left = sum - left, 0 end
                -- The chunks that become one, and the element to delete.
                local from, to, deleted = index, index, nil
                if #rows == 0 then
                    deleted = index
                elseif taken == units then
                    local rows_max = 10 * CHUNK_ENTRIES_MAX
                    local after = index < count and chunk_at(tree, index + 1)
                    local before = index > 1 and chunk_at(tree, index - 1)
                    if after and #rows + 10 * after.count <= rows_max then
                        rows, sum = rows .. rows_of(after, 1, after.count), sum + units_of(directory, index + 1)
                        to, deleted = index + 1, index + 1
                    elseif before and #rows + 10 * before.count <= rows_max then
                        rows, sum = rows_of(before, 1, before.count) .. rows, sum + units_of(directory, index - 1)
                        from, deleted = index - 1, index
                    end
                end
                local record = #rows > 0 and sub(rows, -10, -4) .. pack('>I3', sum) or ''
                local records = rows_of(directory, 1, from - 1) .. record .. rows_of(directory, to + 1, count)

                live(key, state.time, limit.window)
                call('LSET', key, '-1', open_text(oldest, total, closed, left, rows_of(tree, 1, tree.count)))
                if records == '' then return call('LTRIM', key, '-1', '-1') end
                call('LSET', key, '0', 'D' .. records)
                if #rows > 0 then call('LSET', key, text_of(from), 'C' .. rows) end
                if deleted then delete(key, deleted, count) end
            end

            return chunked
        end

        local chunked
        local function chunks()
            chunked = chunked or new_chunked()
            return chunked
        end

        -- Operations that most checks do not need: on plain lists, and on both forms.
        local function new_slow_path()
            local slow_path = {}

            local function number_at(key, index)
                local number = tonumber(call('LINDEX', key, text_of(index)))
                if not number or number % 1 ~= 0 then fail(NOT_A_LOG) end
                return number
            end

            -- Returns the number of units that are not later than `time`: by doubling steps, then by halving.
            function slow_path.units_until(state, time)
                -- All up to `low` are not later, what follows `high` is.
                local low, high, step = 0, state.high, 1
                while low < high do
                    local probe = low + step
                    if probe > high then probe = floor((low + high) / 2) + 1 end
                    if number_at(state.key, probe - 1) <= time then
                        low, step = probe, step * 2
                    else
                        high, step = probe - 1, 1
                    end
                end
                return low
            end

            function slow_path.time_at(state, unit) return number_at(state.key, unit - 1) end

            -- Returns the number of units that stay as they are: not later than now, and not in now's tick.
            function slow_path.cut(state, limit)
                local high = state.time > now and slow_path.units_until(state, now) or state.high
                local time = high > 0 and number_at(state.key, high - 1)
                return time and is_in_tick_of_now(time, limit) and slow_path.units_until(state, time - 1) or high
            end

            -- Takes up to the limit's cost from the newest entry of a tick, searching from the nearer end.
            local function give_back_plain(state, limit, tick, live)
                local key, length = state.key, state.high
                local unit = slow_path.units_until(state, (tick + 1) * limit.tick - 1)
                local time = unit > 0 and number_at(key, unit - 1)
                mark_receipt()
                if time and floor(time / limit.tick) == tick then
                    has_written = true
                    local count = unit * 2 > length and -limit.cost or limit.cost
                    if call('LREM', key, text_of(count), text_of(time)) == length then return end
                    if time == state.time then state.time = number_at(key, -1) end
                end
                live(key, state.time, limit.window)
            end

            -- Plans the write of a plain list, or of a list of which nothing stays. The list becomes chunked if it is to hold more
            -- than a plain one may.
            function slow_path.plan_plain(state)
                local low, high, units = state.low or 0, state.high or 0, state.units
                local is_kept, length = high > low, state.length or high
                if not units then
                    state.sets, state.pushes = {}, {}
                    if low > 0 then state.keep_from, state.keep_to = low, -1 end
                elseif state.tree or state.has_ticks or units > 4 or state.total > PLAIN_UNITS_MAX then
                    local items = is_kept and call('LRANGE', state.key, text_of(low), text_of(high - 1)) or {}
                    chunks().plan_anew(state, items)
                else
                    local sets, pushes = {}, {}
                    for unit = high + 1, high + units do
                        if is_kept and unit <= length then sets[unit - 1] = now_text else pushes[#pushes + 1] = now_text end
                    end
                    state.sets, state.pushes = sets, pushes
                    if not is_kept then
                        if not state.is_new then state.keep_from, state.keep_to = -units, -1 end
                    elseif low > 0 or high + units < length then
                        state.keep_from, state.keep_to = low, high + units - 1
                    end
                end
            end

            function slow_path.set_and_push(state)
                local key = state.key
                for index, text in pairs(state.sets) do call('LSET', key, text_of(index), text) end
                if state.front then call('LPUSH', key, state.front) end
                if #state.pushes > 0 then call('RPUSH', key, unpack(state.pushes)) end
            end

            local function form_of(state) return state.tree and chunks() or slow_path end

            -- Drops the entries that have left the window.
            function slow_path.forget(state, left_until)
                local form = form_of(state)
                local low, oldest, is_in_first = form.units_until(state, left_until)
                state.total, state.low, state.is_low_in_first = state.total - (low - (state.low or 0)), low, is_in_first
                state.oldest = low < state.high and (oldest or form.time_at(state, low + 1)) or state.time
            end

            -- Returns the time of the entry with which `units` units have left, the oldest first.
            function slow_path.time_of(state, units)
                local unit = (state.low or 0) + units
                return unit <= (state.high or 0) and form_of(state).time_at(state, unit) or state.time
            end

            -- Takes `excess` units from the oldest entries, and in the end from the new one.
            function slow_path.take_oldest(state, excess)
                local low, high = (state.low or 0) + excess, state.high or 0
                state.total, state.is_low_in_first = state.total - excess, false
                if low < high then
                    state.low, state.oldest = low, form_of(state).time_at(state, low + 1)
                else
                    state.low, state.units, state.oldest = high, state.units - (low - high), now
                end
            end

            function slow_path.give_back(state, limit, tick, live)
                return (state.tree and chunks().give_back or give_back_plain)(state, limit, tick, live)
            end

            return slow_path
        end

        local slow_path
        local function slow()
            slow_path = slow_path or new_slow_path()
            return slow_path
        end

        -- Joins into the new entry, at now, all entries later than now, and the newest entry before if it is in now's tick.
        local function gather(state, limit)
            local tree, low, length, high = state.tree, state.low or 0, state.high, nil
            if USES_FAST_PATHS and tree and state.time <= now then
                -- Fast path: the last entry of the open chunk is in now's tick.
                state.cut_entry = tree.count - 1
                high = length - struct.unpack('>I3', tree.text, #tree.text - 2)
            else
                high = (tree and chunks() or slow()).cut(state, limit)
            end
            if high <= low then high, state.oldest = low, now end
            state.units, state.time, state.high, state.length = length - high, now, high, length
        end

        local function serves(state, limit)
            return state.limit.window == limit.window and state.limit.tick == limit.tick
        end

        local function load(key, limit)
            local last = try('LINDEX', key, '-1')
            if not last then
                return { key = key, limit = limit, total = 0, units = false, change = false, oldest = false, is_new = true }
            end
            local time, left_until, oldest, total, tree = tonumber(last), now - limit.window, nil, nil, nil
            if not time then
                if last.err then return nil, unreadable(last) end
                if string.byte(last) ~= OPEN or #last < OPEN_HEADER_BYTES + 10 or #last % 10 ~= OPEN_HEADER_BYTES % 10 then return nil, NOT_A_LOG end
                local closed, left
                oldest, total, closed, left = struct.unpack('>I7I3I3I3', last, 2)
                time = struct.unpack('>I7', last, #last - 9)
                if total <= closed or oldest > time or time >= 2 ^ 52 then return nil, NOT_A_LOG end
                tree = {
                    text = last, count = (#last - OPEN_HEADER_BYTES) / 10, at = OPEN_HEADER_BYTES - 9, decoded = 0, sums = false,
                    key = key, closed = closed, left = left,
                }
            elseif time < 0 or time % 1 ~= 0 then
                return nil, NOT_A_LOG
            end
            if time <= left_until then
                return {
                    key = key, limit = limit, total = 0, units = false, change = false, oldest = false,
                    is_stale = true, is_settled = true,
                }
            end
            if not tree then
                oldest, total = tonumber(call('LINDEX', key, '0')), call('LLEN', key)
                if not oldest or oldest < 0 or total > PLAIN_UNITS_MAX then return nil, NOT_A_LOG end
            end
            local state = { key = key, limit = limit, total = total, time = time, units = false, change = false, oldest = oldest, high = total }
            if tree then state.tree, state.low, state.high = tree, tree.left, tree.left + total end
            if time > now then
                gather(state, limit)
                state.is_settled = true
            end
            if oldest <= left_until then
                slow().forget(state, left_until)
                state.is_settled = true
            end
            return state
        end

        local function fits(state, limit, cost) return state.total + cost <= limit.quota end

        local function wait(state, limit, cost)
            if cost > limit.quota then return NEVER end
            local must_leave = state.total + cost - limit.quota
            if must_leave <= 0 then return 0 end
            local time = USES_FAST_PATHS and must_leave == 1 and state.oldest or slow().time_of(state, must_leave)
            return time + limit.window - now
        end

        local function append(state, limit, units)
            local time, how = state.time, 'written'
            state.total = state.total + units
            if limit.tick > 1 then state.has_ticks = true end
            if time == now or time and limit.tick > 1 and is_in_tick_of_now(time, limit) then
                if not state.units then gather(state, limit) end
                state.units = state.units + units
                if state.change == 'written within its TTL' then how = state.change end
            else
                state.time, state.units = now, units
                if not time then
                    state.oldest = now
                elseif time >= limit.ttl_set_from then
                    how = 'written within its TTL'
                end
            end
            change(state, how)
        end

        -- Loads a state. If a quick check of this call has charged the key, that charge becomes part of the state.
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
                if state.total > limit.quota then slow().take_oldest(state, state.total - limit.quota) end
            elseif state.is_settled or state.time and not limit.is_window_fixed then
                change(state, state.change or 'read')
            end
            return wait(state, limit, cost), report(state, limit)
        end

        local function peek(state, limit) return wait(state, limit, 1), report(state, limit) end

        -- Reads what the write of a state needs, and plans the write.
        local function prepare(state)
            local units, high = state.units, state.high
            if not units and not state.is_settled then return end
            local tree, low = state.tree, state.low
            if tree and high > low then
                local count = state.cut_entry or tree.count
                local are_closed_same = low == tree.left or state.is_low_in_first and tree.closed > 0
                if USES_FAST_PATHS and units and not state.cut_chunk and are_closed_same and count < OPEN_ENTRIES_MAX then
                    -- Fast path: only the open chunk changes.
                    state.open = struct.pack('>c1I7I3I3I3', 'O', state.oldest, state.total, tree.left + tree.closed - low, low)
                        .. string.sub(tree.text, OPEN_HEADER_BYTES + 1, OPEN_HEADER_BYTES + 10 * count)
                        .. struct.pack('>I7I3', now, units)
                else
                    chunks().plan(state)
                end
            elseif not USES_FAST_PATHS or state.is_settled or state.low or state.length
                or units > 4 or state.has_ticks or state.total > PLAIN_UNITS_MAX then
                slow().plan_plain(state)
            end
            -- Fast path: a few units at the end of a plain list need no plan; see grow().
        end

        local function grow(state)
            local key, units = state.key, state.units
            -- A state that was only read does not grow.
            if not units or state.change == 'read' then return end
            if state.open then
                call('LSET', key, '-1', state.open)
            elseif state.sets then
                slow().set_and_push(state)
            elseif units == 1 then
                call('RPUSH', key, now_text)
            else
                call('RPUSH', key, unpack({ now_text, now_text, now_text, now_text }, 1, units))
            end
        end

        local function shrink(state)
            local key, was_read = state.key, state.change == 'read'
            if state.is_stale and not state.units then return call('DEL', key) end
            if was_read then
                -- Another limit with a longer window may need the entries for longer, so the TTL only grows. It is set first: a
                -- server that is out of memory accepts that command, and then the writes that follow it.
                live(key, state.time, state.limit.window, 'GT')
                if not state.sets and not state.open then return end
                if state.open then call('LSET', key, '-1', state.open) else slow().set_and_push(state) end
            end
            if state.keep_from then call('LTRIM', key, text_of(state.keep_from), text_of(state.keep_to)) end
            if was_read or state.change == 'written within its TTL' then return end
            live(key, state.time, state.limit.window)
        end

        -- Refunds are written at once, because they may change any entry.
        local function refund(state, limit, at)
            local key = state.key
            if state.is_settled then change(state, state.change or 'read') end
            if state.change then
                write(state)
                state = load(key, limit)
            end
            states[key] = nil
            if state.time then slow().give_back(state, limit, floor(at / limit.tick), live) end
        end

        machine.load, machine.serves, machine.fits, machine.peek = load_charged, serves, fits, peek
        machine.admit, machine.refuse, machine.refund = admit, refuse, refund
        machine.prepare, machine.grow, machine.shrink = prepare, grow, shrink
    end

    local function shape(limit)
        if limit.algorithm == 'sliding' and limit.quota > EXACT_QUOTA_MAX then
            limit.tick = ceil_div(limit.window, EXACT_QUOTA_MAX)
        end
        -- An entry not older than this has already set the TTL that a new entry would set.
        local can_keep_ttl = limit.is_window_fixed and not is_time_given
        limit.ttl_set_from = can_keep_ttl and floor((now + limit.window) / LIFE_STEP) * LIFE_STEP - limit.window or FOREVER
        if USES_FAST_PATHS and limit.tick == 1 and limit.cost == 1 and limit.is_window_fixed and not limit.count_denied then limit.quick = quick end
    end

    local machine = { shape = shape }
    function machine.load(key, limit)
        add_general_path(machine)
        return machine.load(key, limit)
    end
    return machine
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

    -- Computes the state at now under this limit, beside the state that was read: a peek writes nothing.
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
        -- For a fixed window, too: the rule may change to a sliding counter, for which this count is the previous one.
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
            return nil, 'TIDEGATE_FOREIGN the string is not start, window, current, previous'
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
        -- If a changed window were applied anew by every check, the retry_after would move away as it is approached.
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
--
-- A charge leaks sooner if an earlier one was refunded. So the state counts the refunded units, each refund rounded up, and
-- a charge returns the count that it found. Refunds of charges that were made before a refund depend on the difference. The
-- count is forgotten when a full bucket would be empty after the last write. The essay of bucket.rs has the proof.

local function new_bucket()
    local NEVER, WAIT_MAX = -1, 2 ^ 52 - 1
    local bucket = {}

    function bucket.shape(limit, capacity)
        limit.cost_max, limit.spaces = capacity, limit.algorithm == 'leaky-bucket'
        limit.capacity = limit.spaces and capacity + 1 or capacity
        limit.grain = floor(limit.capacity * ceil_div(limit.window, 1048576) / 8500000000) + 1
        limit.parts = ceil_div(limit.window, limit.grain)
    end

    -- Returns the number of grains in which a full bucket leaks.
    local function grains_of_full(limit) return ceil_div(limit.capacity * limit.parts, limit.quota) end

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
        state.viewed, state.v_level, state.v_refunded = limit, level, state.refunded
        if state.refunded > 0 and grains >= grains_of_full(limit) then state.v_refunded = 0 end
    end

    local function until_leaked(limit, parts)
        if parts <= 0 then return 0 end
        local grain, grains = limit.grain, ceil_div(parts, limit.quota)
        if grains > floor(WAIT_MAX / grain) + 1 then return WAIT_MAX end
        local wait = grains * grain - now % grain
        return wait < WAIT_MAX and wait or WAIT_MAX
    end

    local function keep(state, limit)
        state.time, state.level, state.scale, state.refunded = now, state.v_level, limit.parts, state.v_refunded
        state.lives_for = until_leaked(limit, state.refunded > 0 and limit.capacity * limit.parts or state.v_level)
        change(state, 'written')
    end

    function bucket.load(key, limit)
        local text = try('GET', key)
        if not text then return { limit = limit, key = key, change = false, time = 0, level = 0, scale = 0, refunded = 0 } end
        if text.err then return nil, unreadable(text) end
        local time, level, scale, refunded = match(text, '^(%d+) (%d+) (%d+) ?(%d*)$')
        time, level, scale, refunded = whole_of(time), whole_of(level), whole_of(scale), refunded == '' and 0 or whole_of(refunded)
        if not (time and level and scale and refunded) or scale < 1 then
            return nil, 'TIDEGATE_FOREIGN the string is not time, level, scale, and optionally refunded'
        end
        return { limit = limit, key = key, change = false, time = time, level = level, scale = scale, refunded = refunded }
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
            -- This limit may leak more slowly than the one that wrote the state, which must live until it is empty. It may leak
            -- more quickly, too, but not for the limit that wrote it, so the TTL only grows.
            local reset_after = until_leaked(limit, state.v_level)
            if not state.change or reset_after > state.lives_for then state.lives_for = reset_after end
            change(state, state.change or 'read')
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

    -- Returns the parts of a charge that are certainly still in the bucket.
    local function refundable(state, limit, at, reset_after, refunded)
        local grain, quota, parts, capacity = limit.grain, limit.quota, limit.parts, limit.capacity
        local refunded_since = state.v_refunded - refunded
        local lasted, most = floor((at + reset_after) / grain) - floor(at / grain), grains_of_full(limit)
        if lasted > most then lasted = most end
        local passed = floor(now / grain) - floor(at / grain)
        -- No product exceeds 2^53, because the charge has not leaked completely.
        if at > now or refunded_since < 0 or passed >= lasted then return 0 end
        local charged = (limit.cost < capacity and limit.cost or capacity) * parts
        local still_there = (lasted - 1) * quota + 1 - (refunded_since < capacity and refunded_since or capacity) * parts
        still_there = (still_there > charged and still_there or charged) - passed * quota
        if still_there <= 0 then return 0 end
        if still_there > charged then still_there = charged end
        return still_there < state.v_level and still_there or state.v_level
    end

    function bucket.refund(state, limit, at, reset_after, refunded)
        view(state, limit)
        local given = refundable(state, limit, at, reset_after, refunded)
        local refunded_after = state.v_refunded + ceil_div(given, limit.parts)
        if refunded_after < 2 ^ 53 then state.v_level, state.v_refunded = state.v_level - given, refunded_after end
        keep(state, limit)
    end

    function bucket.grow(state)
        if state.lives_for == 0 or state.change == 'read' then return end
        local text = format('%.0f %.0f %.0f', state.time, state.level, state.scale)
        if state.refunded > 0 then text = text .. format(' %.0f', state.refunded) end
        call('SET', state.key, text, 'PX', ttl_of(state.lives_for))
    end

    function bucket.shrink(state)
        if state.lives_for == 0 then
            call('DEL', state.key)
        elseif state.change == 'read' then
            call('PEXPIRE', state.key, ttl_of(state.lives_for), 'GT')
        end
    end

    return bucket
end

-- ── limits ───────────────────────────────────────────────────────────────────────────────────────────

-- A state machine is created when the first limit of the call needs it.
local makers = {
    ['sliding'] = new_log, ['sliding-log'] = new_log,
    ['sliding-counter'] = new_pair, ['fixed-window'] = new_pair,
    ['token-bucket'] = new_bucket, ['leaky-bucket'] = new_bucket,
}
-- The parsed limits by their lines, since most lines of a batch are equal; and the state machines by their makers.
local limits = {}

-- Parses a limit line.
local function limit_of(text)
    if limits[text] then return limits[text] end
    local algorithm, quota, window, cost, options = match(text or '', '^(%S+) (%d+) (%d+) (%d+)(.*)$')
    local maker, quota_max = makers[algorithm], algorithm == 'sliding-log' and 100000 or 10000000
    if not maker then fail('TIDEGATE_ARGUMENT a limit line is ALGORITHM QUOTA WINDOW_US COST and options') end
    quota, window, cost = whole_of(quota), whole_of(window), whole_of(cost)
    if not quota or quota < 1 or quota > quota_max then
        fail(format('TIDEGATE_ARGUMENT a quota of %s is 1 to %d', algorithm, quota_max))
    elseif not window or window < 1000 or window > 34560000000000 then
        fail('TIDEGATE_ARGUMENT a window is 1000 to 34560000000000 microseconds')
    elseif not cost or cost >= 2 ^ 32 then
        fail('TIDEGATE_ARGUMENT a cost is 0 to 4294967295')
    end
    local machine = limits[maker] or maker()
    local limit = {
        machine = machine, algorithm = algorithm, quota = quota, window = window, cost = cost, tick = 1, ttl_set_from = 0, quick = false,
        is_window_fixed = USES_FAST_PATHS and options == ' window=fixed', count_denied = false,
    }
    local capacity = quota
    if not limit.is_window_fixed then
        for option in string.gmatch(options, '%S+') do
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
                fail('TIDEGATE_ARGUMENT options are burst= (token-bucket) and queue= (leaky-bucket), 1 to 10000000, count_denied=1, window=fixed')
            end
        end
    end
    machine.shape(limit, capacity)
    limits[maker], limits[text] = machine, limit
    return limit
end

-- Returns the state of the next key for this limit; or nil and an error if the key holds foreign data.
local key_at = 0
local function next_state(limit)
    key_at = key_at + 1
    local key = KEYS[key_at]
    local state = states[key]
    if state then
        local machine = limit.machine
        if state.limit == limit then return state end
        if state.limit.machine ~= machine then return nil, 'TIDEGATE_FOREIGN one key is used by limits of different kinds' end
        if machine.serves(state, limit) then return state end
        -- Two windows on one counter in one call: the second reads what the first has written.
        if state.change then write(state) end
    elseif not key then
        fail('TIDEGATE_ARGUMENT there are fewer keys than limits')
    end
    local problem
    state, problem = limit.machine.load(key, limit)
    states[key] = state
    return state, problem
end

-- ── the steps ────────────────────────────────────────────────────────────────────────────────────────

local arg_at, arg_count, steps = 1, #ARGV, 0

-- Fast path: runs a check of one limit.
local function check_one(limit, repeats)
    local head = reply_count + 1
    if limit.quick and repeats == 1 then
        local key = KEYS[key_at + 1]
        if key and not states[key] and limit.quick(key, limit, head) then
            reply_count, key_at = head + 6, key_at + 1
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
            reply[at + 6], may_change = state.refunded or 0, true
        elseif cost > 0 then
            reply[at + 1] = 0
            reply[at + 3], reply[at + 2], reply[at + 4], reply[at + 5] = machine.refuse(state, limit, cost)
            reply[at + 6], may_change = 0, limit.count_denied
        else
            reply[at + 1] = 1
            reply[at + 3], reply[at + 2], reply[at + 4], reply[at + 5] = machine.peek(state, limit)
            reply[at + 6] = 0
        end
        at, results = at + 6, results + 1
    until not may_change or results >= repeats
    reply[head], reply_count = results, at
end

-- Creates the steps that begin with a head. Returns the function that parses a head, and check_several.
local function new_steps()
    local NOT_BOTH = 'TIDEGATE_ARGUMENT a call holds checks or refunds, not both'

    -- The last step that named each key.
    local named_in = {}

    -- Returns the next key, which must not have occurred in this step.
    local function next_own_key()
        local key = KEYS[key_at + 1]
        if not key then fail('TIDEGATE_ARGUMENT there are fewer keys than limits') end
        if named_in[key] == steps then fail('TIDEGATE_ARGUMENT a key stands once in a check or refund') end
        named_in[key] = steps
        return key
    end

    -- Returns the next state of a step with several limits. Each must have a counter of its own: all are read before any is
    -- charged, so of two on one counter the second would not see the charge of the first.
    local function next_own_state(limit)
        next_own_key()
        return next_state(limit)
    end

    -- Runs a check of any number of limits: all are read before any is charged.
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
                reply[at + 6 * j - 5], is_admitted = fits and 1 or 0, is_admitted and fits
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
                reply[at + 6] = decide == machine.admit and state.refunded or 0
                at = at + 6
            end
            results = results + 1
        until not may_change or results >= repeats
        reply[head], reply_count = results, at
    end

    -- Returns the longest ban of the next `count` keys in microseconds, -1 for a ban without an end, nil without a ban.
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
        elseif USES_FAST_PATHS and head.count == 1 then
            arg_at = arg_at + 1
            check_one(limit_of(ARGV[arg_at]), head.repeats)
        else
            check_several(head.count, head.repeats)
        end
    end

    -- Runs a refund, or a redemption if the head has a time until which there is one. All counters are read before any
    -- is changed.
    local function refund(head)
        local lines, problem, outcome, receipt, block = {}, nil, 1, nil, nil
        if head.ends_at then
            receipt, key_at = next_own_key(), key_at + 1
            block = now < head.ends_at and try('GET', receipt)
            problem = block and (unreadable(block) or #block > 128 and 'TIDEGATE_FOREIGN the string is not a block of receipts')
            if now >= head.ends_at then
                outcome = -1
            elseif block and not problem then
                -- The first receipt is the highest bit of the first byte.
                local byte = string.byte(block, floor(head.receipt / 8) + 1) or 0
                outcome = 1 - floor(byte / 2 ^ (7 - head.receipt % 8)) % 2
            end
        end
        for j = 1, head.count do
            local limit = limit_of(ARGV[arg_at + 1])
            local state, trouble = next_own_state(limit)
            local second = ARGV[arg_at + 2] or ''
            local is_charge = receipt and second == 'charge'
            local at, reset_after, refunded = match(second, '^(%d+) (%d+) ?(%d*)$')
            at, reset_after, refunded = whole_of(at), whole_of(reset_after), refunded == '' and 0 or whole_of(refunded)
            if is_charge and not limit.count_denied then
                fail('TIDEGATE_ARGUMENT a charge of a redemption has count_denied=1')
            elseif not is_charge and not (at and reset_after and refunded) then
                fail('TIDEGATE_ARGUMENT after the limit line comes AT RESET_AFTER [REFUNDED] or, in a redemption, charge')
            end
            problem, arg_at = problem or trouble, arg_at + 2
            lines[j] = { limit = limit, state = state, at = at, reset_after = reset_after, refunded = refunded }
        end
        -- head_of rejects a check with a head; a check may have none.
        if arg_at < arg_count and not match(ARGV[arg_at + 1], '^refund ') then fail(NOT_BOTH) end
        reply_count = reply_count + 1
        if outcome < 1 or problem then
            reply[reply_count] = outcome < 1 and outcome or { err = problem }
            return
        end
        reply[reply_count] = outcome
        if receipt then
            receipt_key, receipt_number, receipt_ttl, is_block_known = receipt, head.receipt, ttl_of(head.ends_at - now), block
        end
        for j = 1, head.count do
            local line = lines[j]
            local limit, state = line.limit, line.state
            if limit.cost > 0 and line.at then
                limit.machine.refund(state, limit, line.at, line.reset_after, line.refunded)
            elseif limit.cost > 0 then
                -- With count_denied, a refusal charges what fits as an admission does.
                limit.machine.refuse(state, limit, limit.cost)
            end
        end
        if not receipt then return end
        -- A redemption is written as a whole, so that an error in a later step of the call does not leave it half done.
        for j = 1, head.count do
            local state = lines[j].state
            if state.change then write(state) end
            states[state.key] = nil
        end
        mark_receipt()
    end

    local heads, first_verb = {}, nil
    local function head_of(text)
        local head = heads[text]
        if head then return head end
        local verb, count, second, third = match(text, '^([cr]%a+) (%d+) ?(%d*) ?(%d*)$')
        count = tonumber(count)
        if verb == 'check' then
            head = { run = check, count = count, bans = tonumber(second) or 0, repeats = tonumber(third) or 1 }
            if count < 1 or head.repeats < 1 or head.repeats > 1000 then head = nil end
        elseif verb == 'refund' and second .. third == '' then
            head = count > 0 and { run = refund, count = count }
        elseif verb == 'refund' then
            head = { run = refund, count = count, ends_at = whole_of(second), receipt = whole_of(third) }
            if not head.ends_at or not head.receipt or head.receipt > 1023 then head = nil end
        end
        if not head then
            fail('TIDEGATE_ARGUMENT a step is a limit line, check LIMITS [BANS [REPEAT]] with a REPEAT of 1 to 1000, or refund LIMITS [UNTIL RECEIPT]')
        end
        -- Steps before the first head are checks.
        first_verb = first_verb or steps > 1 and 'check' or verb
        if verb ~= first_verb then fail(NOT_BOTH) end
        heads[text] = head
        return head
    end

    return head_of, check_several
end

-- Decides all steps. Writes nothing, except where `has_written` says so.
local head_of, check_several
local function run()
    while arg_at < arg_count do
        arg_at, steps = arg_at + 1, steps + 1
        local text = ARGV[arg_at]
        local limit = limits[text]
        if not head_of and (not USES_FAST_PATHS or not limit and match(text, '^[cr]')) then
            head_of, check_several = new_steps()
        end
        if not limit and match(text, '^[cr]') then
            local head = head_of(text)
            head.run(head)
        elseif USES_FAST_PATHS then
            check_one(limit or limit_of(text), 1)
        else
            arg_at = arg_at - 1
            check_several(1, 1)
        end
    end
    -- What the writes need is read before the first one.
    for i = 1, changed_count do
        local state = changed[i]
        local prepare = state.change and state.limit.machine.prepare
        if prepare then prepare(state) end
    end
end

local is_done, problem = pcall(run)
if not is_done then
    local text = type(problem) == 'table' and problem.err or tostring(problem)
    -- Errors of this script and of the server begin with a code. An error of Lua begins with its line: a bug in this script.
    if not match(text, '^%u[%u_]+ ') then text = 'TIDEGATE_INTERNAL ' .. text end
    return { err = has_written and 'TIDEGATE_PARTLY ' .. text or text }
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
