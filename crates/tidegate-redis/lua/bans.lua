-- The ban list of a prefix: a hash of entries and their ends, with a version.
--
-- KEYS    the hash
-- ARGV    read                  the whole list
--         add ENTRY MS MAX      adds an entry that ends after MS milliseconds, or never if MS is 0
--         remove ENTRY          removes an entry
-- RETURNS read: {version, now, {field, end, …}}, with the field `version` among the others
--         add: 1, or 0 if the list has MAX other entries; then nothing is added
--         remove: 1 if the entry was in force, else 0
--
-- Ends are in milliseconds since the epoch, by the server's clock; 0 is a permanent ban. One call per change, so that
-- two operators never lose each other's entries. A change drops the entries that have ended. The hash expires with its
-- last entry, unless one is permanent. The version grows with every change, also after the hash has expired.

local key, command, entry = KEYS[1], ARGV[1], ARGV[2]
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local fields = redis.call('HGETALL', key)

if command == 'read' then
  return {redis.call('HGET', key, 'version') or '0', string.format('%.0f', now), fields}
end

local count, latest, is_permanent, was_listed, version = 0, 0, false, 0, 0
for at = 1, #fields, 2 do
  local field, ends = fields[at], tonumber(fields[at + 1])
  if field == 'version' then
    version = ends
  elseif ends ~= 0 and ends <= now then
    redis.call('HDEL', key, field)
  elseif field == entry then
    was_listed = 1
  else
    count = count + 1
    latest = math.max(latest, ends)
    is_permanent = is_permanent or ends == 0
  end
end

local result = was_listed
if command == 'add' then
  if count >= tonumber(ARGV[4]) then
    return 0
  end
  local ms = tonumber(ARGV[3])
  local ends = ms == 0 and 0 or now + ms
  redis.call('HSET', key, entry, string.format('%.0f', ends))
  count, latest, is_permanent, result = count + 1, math.max(latest, ends), is_permanent or ends == 0, 1
else
  redis.call('HDEL', key, entry)
end

if count == 0 then
  redis.call('DEL', key)
  return result
end
redis.call('HSET', key, 'version', string.format('%.0f', math.max(version + 1, time[1] * 1000000 + time[2])))
if is_permanent then
  redis.call('PERSIST', key)
else
  redis.call('PEXPIREAT', key, string.format('%.0f', latest))
end
return result
