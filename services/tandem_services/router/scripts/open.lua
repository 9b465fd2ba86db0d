-- The registry as one table. Keys of another type are dropped and counted; an overfull hash loses only fields that do not
-- belong to a live worker.

-- Returns the number of dropped fields, and of rows.
local function trim_registry(keys, now)
  local dropped, count = 0, redis.call('HLEN', keys[1])
  if count > MAX_WORKERS then
    dropped = dropped + trim(keys[1], function(incarnation, row)
      return worker_of(incarnation) ~= nil and lease_state(row, now) == 'live'
    end)
    count = count - dropped
  end
  if redis.call('HLEN', keys[2]) > MAX_WORKERS then
    dropped = dropped + trim(keys[2], function(_, verdict)
      local incarnation = read_verdict(verdict)
      return incarnation ~= nil and redis.call('HEXISTS', keys[1], incarnation) == 1
    end)
  end
  if redis.call('HLEN', keys[3]) > MAX_META_FIELDS then
    redis.call('UNLINK', keys[3])
    dropped = dropped + 1
  end
  return dropped, count
end

-- The registry after a look at each key.
local function mended(keys, args)
  local dropped, now = 0, now_ms()
  for _, key in ipairs(keys) do
    dropped = dropped + drop_unless(key, 'hash')
  end
  local trimmed, count = trim_registry(keys, now)
  dropped = dropped + trimmed
  local state = opened(keys, args, count, now, dropped)
  if dropped > 0 then lost_entries(state) end
  return state
end

-- Number of fields of a hash; more than any limit for a key of another type, of which HLEN fails.
local function size_of(key)
  local size = redis.pcall('HLEN', key)
  return type(size) == 'number' and size or math.huge
end

local function open(keys, args)
  local count = size_of(keys[1])
  if count > MAX_WORKERS or size_of(keys[2]) > MAX_WORKERS or size_of(keys[3]) > MAX_META_FIELDS then
    return mended(keys, args)
  end
  return opened(keys, args, count, now_ms(), 0)
end

-- The same for decisions, of which there are thousands per second: they use only `fleet` and `meta`. The next heartbeat
-- checks the other key.
local function open_to_route(keys, args)
  local count = size_of(keys[1])
  if count > MAX_WORKERS or size_of(keys[3]) == math.huge then return mended(keys, args) end
  return opened(keys, args, count, now_ms(), 0)
end
