-- Who is alive. Leases end by Redis time; a lapsed incarnation is no longer offered, a retired one is
-- fenced: it never counts again, its index entries are gone, and its next heartbeat is told so.

local function retire(state, incarnation)
  redis.call('HDEL', state.fleet, incarnation)
  redis.call('UNLINK', state.prefix .. 'blocks:' .. incarnation, state.prefix .. 'cursor:' .. incarnation,
    state.prefix .. 'host:' .. incarnation, state.prefix .. 'links:' .. incarnation)
  redis.call('ZADD', state.fenced, state.now + FENCED_MEMORY_MS, incarnation)
  redis.call('PEXPIRE', state.fenced, FENCED_MEMORY_MS)
  local worker_id = worker_of(incarnation)
  if worker_id and redis.call('HGET', state.owner, worker_id) == incarnation then
    redis.call('HDEL', state.owner, worker_id)
    redis.call('UNLINK', state.prefix .. 'worker:' .. worker_id)
  end
  redis.call('HINCRBY', state.meta, 'generation', 1)
end

-- Note that the registry was used. When nobody called for a lease, Redis itself was away and nobody could
-- have renewed: an amnesty keeps everyone from being fenced for it. The same holds after a wipe, which is
-- recognised by the missing epoch.
local function touch(state, epoch_seed)
  local last = meta_number(state, 'last_call')
  doubt_fleet(state.prefix)
  redis.call('HSET', state.meta, 'last_call', state.now)
  if not redis.call('HGET', state.meta, 'epoch') then
    redis.call('HSET', state.meta, 'epoch', epoch_seed, 'generation', 1)
    drop_notes_of(state.prefix)
  end
  if state.now - last > LEASE_MS or state.now < last then
    redis.call('HSET', state.meta, 'amnesty_until', state.now + FENCE_AFTER_MS)
  end
end

local function sweep_fleet(state)
  local may_fence = state.now >= meta_number(state, 'amnesty_until')
  local budget = SWEEP_STEP
  local rows = redis.call('HGETALL', state.fleet)
  for i = 1, #rows, 2 do
    if budget == 0 then return end
    local kind, lease_ms = lease_state(rows[i + 1], state.now)
    if kind == 'rubbish' then
      redis.call('HDEL', state.fleet, rows[i])
      if state.dropped == 0 then lost_entries(state.meta) end
      state.dropped = state.dropped + 1
      budget = budget - 1
    elseif kind == 'lapsed' and may_fence and state.now - lease_ms > FENCE_AFTER_MS - LEASE_MS then
      retire(state, rows[i])
      budget = budget - 1
    end
  end
end

-- Bounded and at most once a second, whoever comes first.
local function sweep(state)
  if math.abs(state.now - meta_number(state, 'swept_at')) < SWEEP_EVERY_MS then return end
  redis.call('HSET', state.meta, 'swept_at', state.now)
  redis.call('ZREMRANGEBYSCORE', state.fenced, '-inf', state.now)
  sweep_fleet(state)
end

-- The incarnation that keeps `incarnation` from holding its name, or nil.
local function usurper(state, incarnation, worker_id, number)
  local owner = redis.call('HGET', state.owner, worker_id)
  if not owner or owner == incarnation then return nil end
  local _, owner_number = worker_of(owner)
  local row = redis.call('HGET', state.fleet, owner)
  local live = row and lease_state(row, state.now) == 'live'
  if live and owner_number and newer(owner_number, number) then return owner end
  retire(state, owner)
  return nil
end

-- Another deployment that uses the same cluster name on this Redis, or nil (RELIABILITY E6.74).
local function stranger(state, deployment)
  local holder = redis.call('HGET', state.meta, 'deployment')
  if holder and holder ~= deployment and meta_number(state, 'deployment_until') > state.now then return holder end
  redis.call('HSET', state.meta, 'deployment', deployment, 'deployment_until', state.now + LEASE_MS)
  return nil
end

-- `links`: text as in keys.py. Replaces what was there.
local function write_links(key, links)
  if links == '' then
    redis.call('UNLINK', key)
  else
    redis.call('SET', key, links, 'PX', INDEX_TTL_MS)
  end
end

local function write_lease(state, args, incarnation, worker_id, number)
  if redis.call('HGET', state.owner, worker_id) ~= incarnation then
    redis.call('HINCRBY', state.meta, 'generation', 1)
  end
  redis.call('HSET', state.owner, worker_id, incarnation)
  local report_ms = state.now - tonumber(args[7])
  local standing = standing_reservations(redis.call('HGET', state.fleet, incarnation), state.now, report_ms)
  redis.call('HSET', state.fleet, incarnation,
    struct.pack('<dd', state.now + LEASE_MS, report_ms) .. args[6] .. standing)
  local described = state.prefix .. 'worker:' .. worker_id
  redis.call('UNLINK', described)
  redis.call('HSET', described, 'incarnation', incarnation, 'number', number, unpack(args, 9))
  redis.call('PEXPIRE', described, LEASE_MS)
  redis.call('PEXPIRE', state.prefix .. 'blocks:' .. incarnation, INDEX_TTL_MS)
  redis.call('PEXPIRE', state.prefix .. 'cursor:' .. incarnation, INDEX_TTL_MS)
  redis.call('PEXPIRE', state.prefix .. 'host:' .. incarnation, INDEX_TTL_MS)
  write_links(state.prefix .. 'links:' .. incarnation, args[8])
  for _, key in ipairs({state.fleet, state.owner, state.meta}) do
    redis.call('PEXPIRE', key, FLEET_TTL_MS)
  end
end

-- heartbeat: register or renew, atomically. The newest number of a worker_id wins.
-- ARGV: 1 prefix, 2 incarnation, 3 deployment, 4 epoch seed, 5 generation known to the caller, 6 row payload,
--       7 age of the load report in ms, 8 links from here (as text, see keys.py),
--       9… field, value, … of the readable hash
-- Returns msgpack {status = renewed | fenced | foreign, by, epoch, generation, cursor, members, dropped}.
--   cursor: revision of the index of this incarnation, -1 when there is none; members: incarnations that are
--   not fenced, only when the generation differs from the caller's.
local function heartbeat(keys, args)
  local state = open(keys, args)
  local incarnation = args[2]
  local worker_id, number = worker_of(incarnation)
  if not worker_id or #args[6] ~= PAYLOAD_BYTES then
    return redis.error_reply('ERR heartbeat of a malformed incarnation or row')
  end
  local holder = stranger(state, args[3])
  if holder then return cmsgpack.pack({status = 'foreign', by = holder}) end
  touch(state, args[4])
  sweep(state)
  if redis.call('ZSCORE', state.fenced, incarnation) then
    return cmsgpack.pack({status = 'fenced', by = redis.call('HGET', state.owner, worker_id) or ''})
  end
  local other = usurper(state, incarnation, worker_id, number)
  if other then return cmsgpack.pack({status = 'fenced', by = other}) end
  drop_unless(state.prefix .. 'worker:' .. worker_id, 'hash')
  write_lease(state, args, incarnation, worker_id, number)
  local generation = meta_number(state, 'generation')
  local reply = {
    status = 'renewed', epoch = redis.call('HGET', state.meta, 'epoch'), generation = generation,
    cursor = cursor_of(state.prefix .. 'blocks:' .. incarnation, state.prefix .. 'cursor:' .. incarnation),
    dropped = state.dropped,
  }
  if generation ~= tonumber(args[5]) then reply.members = redis.call('HKEYS', state.fleet) end
  return cmsgpack.pack(reply)
end

-- deregister: leave at once instead of waiting for the lease to end. Idempotent.
-- ARGV: 1 prefix, 2 incarnation. Returns 1.
local function deregister(keys, args)
  retire(open(keys, args), args[2])
  return 1
end

-- snapshot: everything a gateway knows about the fleet, from the readable hashes of live incarnations.
-- ARGV: 1 prefix, 2 epoch seed. Returns msgpack {epoch, generation, dropped, workers = {{field, value, …}, …}}.
local function snapshot(keys, args)
  local state = open(keys, args)
  touch(state, args[2])
  sweep(state)
  local workers = {}
  local rows = redis.call('HGETALL', state.fleet)
  for i = 1, #rows, 2 do
    local worker_id = worker_of(rows[i])
    if worker_id and lease_state(rows[i + 1], state.now) == 'live' then
      local described = state.prefix .. 'worker:' .. worker_id
      state.dropped = state.dropped + drop_unless(described, 'hash')
      if redis.call('HGET', described, 'incarnation') == rows[i] then
        workers[#workers + 1] = redis.call('HGETALL', described)
      end
    end
  end
  return cmsgpack.pack({
    epoch = redis.call('HGET', state.meta, 'epoch'), generation = meta_number(state, 'generation'),
    dropped = state.dropped, workers = workers,
  })
end

register('heartbeat', heartbeat)
register('deregister', deregister)
register('snapshot', snapshot)
