-- Announces an instance that shares this store, and counts the live ones.
--
-- KEYS     the set of the instances: a sorted set of ids, scored by the time of the last announcement in milliseconds
-- ARGV     the id; the lifetime of an announcement in milliseconds; the largest size of the set; the time in
--          milliseconds, or empty for the server's clock
-- RETURNS  the number of live instances; 1 if this instance was live before the call, else 0
--
-- The set grows before it shrinks, so that a server that has reached its maxmemory refuses the call as a whole. If the
-- set is full, a new instance is not added, and the result is the size of the set.
local instances, id, lifetime, size_max = KEYS[1], ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3])
local now, ttl = tonumber(ARGV[4]), 600000
if not now then
  local time = redis.call('TIME')
  now, ttl = time[1] * 1000 + math.floor(time[2] / 1000), lifetime
end
local expired = now - lifetime

local announced = redis.pcall('ZSCORE', instances, id)
if type(announced) == 'table' then
  if string.find(announced.err, 'WRONGTYPE', 1, true) then
    return redis.error_reply('TIDEGATE_FOREIGN the key of the instances holds other data')
  end
  return announced
end
local was_live = announced and tonumber(announced) > expired

redis.call('ZADD', instances, now, id)
-- Announcements from the future: the clock was set back. From now on they expire like any other.
for _, other in ipairs(redis.call('ZRANGEBYSCORE', instances, string.format('(%.0f', now), '+inf')) do
  redis.call('ZADD', instances, now, other)
end
redis.call('ZREMRANGEBYSCORE', instances, '-inf', string.format('%.0f', expired))
local live = redis.call('ZCARD', instances)
if live > size_max and not was_live then
  redis.call('ZREM', instances, id)
  live = size_max
end
redis.call('PEXPIRE', instances, ttl)
return { live, was_live and 1 or 0 }
