-- Which workers have joined, changed, lapsed or left, so that readers read differences and not the whole fleet.
--
--   changes  ZSET  incarnation → the generation of its last change; '' → the generation since which it names all changes
--
-- Every change raises the generation, so the highest score equals the generation. Where it does not, another release has
-- changed the registry, or the set was lost or overwritten: then it starts again from now, and readers read all workers.
-- So they do after a failover: a replica that lags gives numbers to changes that readers know as numbers of others.

local EVER = '' -- no incarnation is empty

-- The generation since which all changes are known.
local function known_since(state)
  local key, generation = state.changes, generation_of(state)
  local newest = redis.pcall('ZRANGE', key, -1, -1, 'WITHSCORES')
  if newest.err then
    state.dropped, newest = state.dropped + drop_unless(key, 'zset'), {}
  end
  local last = tonumber(newest[2] or '')
  local since = tonumber(redis.call('ZSCORE', key, EVER) or '')
  local sound = last == generation and since and since >= 1 and since <= generation
  if sound and redis.call('ZCARD', key) <= MAX_CHANGES then return since end
  redis.call('UNLINK', key)
  redis.call('ZADD', key, string.format('%.0f', generation), EVER)
  redis.call('PEXPIRE', key, FLEET_TTL_MS)
  return generation
end

local MAX_SERVED = 64
local served, served_count = {}, 0 -- Redis time of the last call in this process of Redis, by key prefix

-- A process of Redis that has served no call for the time of a lease, or none at all, may have been a replica.
local function serve_generations(state)
  local last = served[state.prefix]
  if not last and served_count == MAX_SERVED then served, served_count = {}, 0 end
  if not last then served_count = served_count + 1 end
  served[state.prefix] = state.now
  if not last or state.now - last > LEASE_MS or generation_of(state) == 0 then new_generation(state) end
end

-- `incarnation` joined, changed, lapsed or left.
local function note_change(state, incarnation)
  known_since(state)
  next_generation(state)
  local key = state.changes
  redis.call('ZADD', key, string.format('%.0f', generation_of(state)), incarnation)
  redis.call('PEXPIRE', key, FLEET_TTL_MS)
  local excess = redis.call('ZCARD', key) - MAX_CHANGES
  if excess > 0 then
    excess = excess + MAX_CHANGES / 4
    local first = redis.call('ZRANGE', key, excess - 1, excess - 1, 'WITHSCORES')[2]
    redis.call('ZREMRANGEBYRANK', key, 0, excess - 1)
    redis.call('ZADD', key, first, EVER)
  end
end

-- Incarnations that changed after generation `since`; nil if that is not known. Generations begin at 1.
local function changed_since(state, since)
  local generation = generation_of(state)
  if since < 1 or since < known_since(state) or since > generation then return nil end
  if since == generation then return {} end
  local names, found = redis.call('ZRANGE', state.changes, string.format('(%.0f', since), '+inf', 'BYSCORE'), {}
  for _, name in ipairs(names) do
    if worker_of(name) then found[#found + 1] = name end
  end
  return found
end
