-- Adapters that gateways have registered. Values are signed text, which gateways compare and this script does not read.

-- sync_adapters: change entries that still are what the caller has read, and return all.
-- KEYS: 1 adapters. ARGV: per change: the field, its text as read (empty for none), its new text (empty to remove it).
-- Returns msgpack {entries = {{field, text}, …}}.
local function sync_adapters(keys, args)
  drop_unless(keys[1], 'hash')
  if redis.call('HLEN', keys[1]) > MAX_REGISTERED then redis.call('UNLINK', keys[1]) end -- gateways write theirs again
  for i = 1, #args, 3 do
    if (redis.call('HGET', keys[1], args[i]) or '') == args[i + 1] then
      if args[i + 2] == '' then
        redis.call('HDEL', keys[1], args[i])
      else
        redis.call('HSET', keys[1], args[i], args[i + 2])
      end
    end
  end
  local entries, flat = {}, redis.call('HGETALL', keys[1])
  for i = 1, #flat, 2 do entries[#entries + 1] = {flat[i], flat[i + 1]} end
  return cmsgpack.pack({entries = entries})
end

register('sync_adapters', sync_adapters)
