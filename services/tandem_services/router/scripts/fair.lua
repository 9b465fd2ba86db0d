-- Virtual token counters of all gateways together; `usage_counters.py` defines them and does the same for one gateway.
-- And the queue head of each gateway: a slot may go to the tenant with the least counter at any gateway (`fair_queue.py`).
--
--   fair     HASH  tenant → its counter; the field ':' → where the last tenant left
--   backlog  ZSET  tenant that waits at some gateway → until when that counts
--   wishes   HASH  gateway → until when that counts, the priority and the tenant that its next slot is for
--   places   STR   until when that counts, and how many places gateways have left to others
--
-- A counter that its tenant would be raised above on its return is dropped, so there are as many as tenants that wait or
-- are ahead of the others.

local FAIR_TYPES = {'hash', 'zset', 'hash', 'string'}
local PRIORITY_CHARS = 20 -- of -2^63; a longer one is malformed
local FLOOR = ':' -- no tenant is called so; the one of a gateway without keys is called ''

-- Counters begin at 0 and grow; a gateway takes back less than it has charged. What is no such number was written by
-- something else, and the tenant begins at the floor again. One that is far ahead of the floor would never be served.
local MAX_VIRTUAL = 1e15
local MAX_AHEAD = 1e12

local function read_counter(text, floor)
  if type(text) ~= 'string' or #text > 24 or not string.find(text, '^%-?%d+%.?%d*$') then return floor end
  local value = tonumber(text)
  if not (value > -MAX_AHEAD and value < MAX_VIRTUAL) then return floor end
  return value
end

local function counter(key, tenant, floor)
  local value = read_counter(redis.call('HGET', key, tenant), floor)
  return tenant ~= FLOOR and value > floor + MAX_AHEAD and floor or value
end

local function set_counter(key, tenant, value)
  redis.call('HSET', key, tenant, string.format('%.6f', value))
end

-- The least counter of those that wait; nil when none does.
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
    if tenant ~= FLOOR and not redis.call('ZSCORE', keys[2], tenant)
        and read_counter(fields[i + 1], floor) <= floor then
      redis.call('HDEL', keys[1], tenant)
    end
  end
end

-- Add what one gateway has charged: `charges` from `first` on are a tenant's name, the virtual tokens and 1 if it waits
-- there now, else 0. Returns where these tenants stand, and the floor.
local function add_charges(keys, charges, first, now)
  local floor, values = counter(keys[1], FLOOR, 0), {}
  for i = first, #charges, 3 do
    local tenant, charged, waits = charges[i], tonumber(charges[i + 1]), charges[i + 2] == '1'
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
  set_counter(keys[1], FLOOR, floor)
  forget_idle(keys, floor)
  return values, floor
end

-- Store the queue head of `gateway`, none if empty, and return those of others: {priority, counter} of each, as text
-- (a priority of 2^53 and more would lose its unit as a number).
local function remote_queue_heads(keys, gateway, head, now, floor)
  if redis.call('HLEN', keys[3]) > MAX_GATEWAYS then redis.call('UNLINK', keys[3]) end
  if head == '' then
    redis.call('HDEL', keys[3], gateway)
  else
    redis.call('HSET', keys[3], gateway, string.format('%.0f %s', now + QUEUE_HEAD_TTL_MS, head))
    redis.call('PEXPIRE', keys[3], FLEET_TTL_MS)
  end
  local heads, entries = {}, redis.call('HGETALL', keys[3])
  for i = 1, #entries, 2 do
    local till, priority, tenant = string.match(entries[i + 1], '^(%d+) (%-?%d+) (.*)$')
    till = tonumber(till or '') or 0
    if till <= now or till > now + QUEUE_HEAD_TTL_MS or #priority > PRIORITY_CHARS then
      redis.call('HDEL', keys[3], entries[i])
    elseif entries[i] ~= gateway then
      heads[#heads + 1] = {priority, string.format('%.6f', counter(keys[1], tenant, floor))}
    end
  end
  return heads
end

-- `left` places more are there for gateways that take them, and up to `wanted` are taken. Returns how many.
local function pass_places(key, left, wanted, now)
  local till, there = string.match(redis.call('GET', key) or '', '^(%d+) (%d+)$')
  if not till or tonumber(till) <= now or tonumber(till) > now + YIELDED_SLOT_TTL_MS then there = 0 end
  there = math.min(tonumber(there) + left, MAX_PLACES)
  local taken = math.min(there, wanted)
  if left > 0 or taken > 0 then
    if left > 0 then till = string.format('%.0f', now + YIELDED_SLOT_TTL_MS) end
    redis.call('SET', key, string.format('%s %.0f', till, there - taken), 'PX', FLEET_TTL_MS)
  end
  return taken
end

-- fair_sync: add what one gateway has charged, and return its tenants' counters, queue heads elsewhere, and which slots
-- were left to it.
-- KEYS: 1 fair, 2 backlog, 3 wishes, 4 places
-- ARGV: 1 the gateway, 2 its queue head: priority, space, tenant; or nothing, 3 places it leaves to others, 4 places it
--       would take, 5… per tenant: its name, the virtual tokens charged since the last call, 1 if it waits there now else 0
-- Returns msgpack {floor, values = {{tenant, counter}, …}, wishes = {{priority, counter}, …} of other gateways, places};
-- counters and priorities as text.
local function fair_sync(keys, args)
  for i, kind in ipairs(FAIR_TYPES) do drop_unless(keys[i], kind) end
  if redis.call('HLEN', keys[1]) > MAX_TENANTS then redis.call('UNLINK', keys[1]) end
  local now = now_ms()
  redis.call('ZREMRANGEBYSCORE', keys[2], '-inf', now)
  redis.call('ZREMRANGEBYSCORE', keys[2], '(' .. string.format('%.0f', now + BACKLOG_MS), '+inf')
  local values, floor = add_charges(keys, args, 5, now)
  redis.call('PEXPIRE', keys[1], FLEET_TTL_MS)
  redis.call('PEXPIRE', keys[2], FLEET_TTL_MS)
  -- As text: integers of 2^53 and more would lose their unit.
  local counters = {}
  for tenant, value in pairs(values) do counters[#counters + 1] = {tenant, string.format('%.6f', value)} end
  return cmsgpack.pack({
    floor = string.format('%.6f', floor), values = counters,
    wishes = remote_queue_heads(keys, args[1], args[2], now, floor),
    places = pass_places(keys[4], tonumber(args[3]), tonumber(args[4]), now),
  })
end

register('fair_sync', fair_sync)
