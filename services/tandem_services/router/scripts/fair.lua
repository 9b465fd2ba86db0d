-- Virtual token counters of all gateways together; `virtual_counters.py` tells what they are and does the same for one.
--
--   fair     HASH  tenant → its counter; the field '' → where the last tenant left
--   backlog  ZSET  tenant that waits at some gateway → until when that counts
--
-- A counter that its tenant would be raised above on its return is dropped, so there are as many as tenants that wait or
-- are ahead of the others.

local function counter(key, tenant, floor)
  return tonumber(redis.call('HGET', key, tenant) or '') or floor
end

local function set_counter(key, tenant, value)
  redis.call('HSET', key, tenant, string.format('%.6f', value))
end

-- The least counter of those that wait; nil when nobody does.
local function least_waiting(keys, floor)
  local least
  for _, tenant in ipairs(redis.call('ZRANGE', keys[2], 0, -1)) do
    local value = counter(keys[1], tenant, floor)
    if not least or value < least then least = value end
  end
  return least
end

local function forget_idle(keys, floor)
  local fields = redis.call('HGETALL', keys[1])
  for i = 1, #fields, 2 do
    local tenant = fields[i]
    if tenant ~= '' and not redis.call('ZSCORE', keys[2], tenant)
        and (tonumber(fields[i + 1]) or floor) <= floor then
      redis.call('HDEL', keys[1], tenant)
    end
  end
end

-- fair_sync: add what one gateway has charged, and tell where its tenants stand.
-- KEYS: 1 fair, 2 backlog
-- ARGV: per tenant: its name, the virtual tokens charged since the last call, 1 if it waits there now else 0
-- Returns msgpack {floor, values = {tenant = counter}, waiting = the least counter of all that wait, or the floor}.
local function fair_sync(keys, args)
  drop_unless(keys[1], 'hash')
  drop_unless(keys[2], 'zset')
  if redis.call('HLEN', keys[1]) > MAX_TENANTS then redis.call('UNLINK', keys[1]) end
  local now = now_ms()
  redis.call('ZREMRANGEBYSCORE', keys[2], '-inf', now)
  local floor = counter(keys[1], '', 0)
  local values = {}
  for i = 1, #args, 3 do
    local tenant, charged, waits = args[i], tonumber(args[i + 1]), args[i + 2] == '1'
    local value = counter(keys[1], tenant, floor)
    if not redis.call('ZSCORE', keys[2], tenant) then
      value = math.max(value, least_waiting(keys, floor) or floor)
    end
    value = value + charged
    set_counter(keys[1], tenant, value)
    values[tenant] = value
    if waits then
      redis.call('ZADD', keys[2], now + BACKLOG_MS, tenant)
    else
      redis.call('ZREM', keys[2], tenant)
      if redis.call('ZCARD', keys[2]) == 0 and value > floor then floor = value end
    end
  end
  set_counter(keys[1], '', floor)
  forget_idle(keys, floor)
  redis.call('PEXPIRE', keys[1], FLEET_TTL_MS)
  redis.call('PEXPIRE', keys[2], FLEET_TTL_MS)
  -- As text: integers of 2^53 and more would lose their unit.
  local told = {}
  for tenant, value in pairs(values) do told[#told + 1] = {tenant, string.format('%.6f', value)} end
  local waiting = least_waiting(keys, floor) or floor
  return cmsgpack.pack({floor = string.format('%.6f', floor), values = told, waiting = string.format('%.6f', waiting)})
end

register('fair_sync', fair_sync)
