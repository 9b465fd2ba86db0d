-- Leases of workers, which end by Redis time. An incarnation whose lease has lapsed is no longer offered, and is removed
-- later. A worker that does not reach Redis may still be alive, so it may register again at any time.
-- An incarnation is fenced only by a verdict that a process of the deployment has signed: a newer incarnation of the same
-- worker, a peer that found it dead, or the worker itself when it leaves. Readers of a verdict check the signature.

local function fence_key(state, incarnation)
  return state.prefix .. 'fenced:' .. incarnation
end

-- The verdict on `incarnation`, as text; nil if there is none.
local function verdict_on(state, incarnation)
  local key = fence_key(state, incarnation)
  local length = redis.pcall('STRLEN', key)
  if length == 0 then return nil end
  if type(length) ~= 'number' then
    state.dropped = state.dropped + drop_unless(key, 'string')
    return nil
  end
  local verdict = length <= MAX_VERDICT_BYTES and redis.call('GET', key)
  if verdict and read_verdict(verdict) then return verdict end
  redis.call('UNLINK', key)
  return nil
end

local function forget_index(state, incarnation)
  redis.call('UNLINK', state.prefix .. 'blocks:' .. incarnation, state.prefix .. 'cursor:' .. incarnation,
    state.prefix .. 'host:' .. incarnation, state.prefix .. 'links:' .. incarnation)
end

-- Removes all entries of `incarnation`.
local function retire(state, incarnation)
  unrank(state, incarnation, redis.call('HGET', state.fleet, incarnation))
  redis.call('HDEL', state.fleet, incarnation)
  drop_kept(state, incarnation)
  drop_tag(state, incarnation)
  forget_index(state, incarnation)
  local worker_id = worker_of(incarnation)
  if worker_id and read_verdict(redis.call('HGET', state.owner, worker_id)) == incarnation then
    redis.call('HDEL', state.owner, worker_id)
    redis.call('UNLINK', state.prefix .. 'worker:' .. worker_id)
  end
  note_change(state, incarnation)
end

local function fence_incarnation(state, incarnation, verdict)
  retire(state, incarnation)
  redis.call('SET', fence_key(state, incarnation), verdict, 'PX', FENCED_MEMORY_MS)
end

-- Records that the registry was used, to NOTED_EVERY_MS. If there was no call for the time of a lease, Redis was
-- unavailable and no worker could renew: a grace period keeps their indexes from being dropped. The same holds after a
-- wipe, which the missing epoch shows. Returns whether it recorded the call.
local function touch(state, epoch_seed)
  read_meta(state)
  local last = meta_time(state, 'last_call', 0)
  local noted = state.now - last >= NOTED_EVERY_MS
  if noted then set_meta_time(state, 'last_call', state.now) end
  if not epoch_of(state) then
    set_meta(state, 'epoch', epoch_seed)
    drop_notes_of(state.prefix)
  end
  serve_generations(state)
  if state.now - last > LEASE_MS then
    set_meta_time(state, 'grace_until', state.now + FENCE_AFTER_MS)
  elseif meta_field(state, 'grace_until') and meta_time(state, 'grace_until', FENCE_AFTER_MS) <= state.now then
    redis.call('HDEL', state.meta, 'grace_until')
    state.fields.grace_until = nil
  end
  return noted
end

-- `swept_at`: when the last sweep was. A lease that has ended since is noted once.
local function sweep_fleet(state, swept_at)
  local may_forget = state.now >= meta_time(state, 'grace_until', FENCE_AFTER_MS)
  local budget, unpublished = SWEEP_STEP, 0
  local rows = redis.call('HGETALL', state.fleet)
  for i = 1, #rows, 2 do
    local kind, lease_ms = lease_state(rows[i + 1], state.now)
    if kind == 'malformed' or not worker_of(rows[i]) then
      redis.call('HDEL', state.fleet, rows[i])
      if state.dropped == 0 then lost_entries(state) end
      state.dropped = state.dropped + 1
    elseif kind == 'lapsed' and may_forget and budget > 0 and state.now - lease_ms > FENCE_AFTER_MS - LEASE_MS then
      retire(state, rows[i])
      budget = budget - 1
    elseif kind == 'lapsed' and lease_ms >= swept_at then
      note_change(state, rows[i])
    elseif kind == 'live' and unpublished < MAX_UNPUBLISHED then
      unpublished = unpublished + rank_row(state, rows[i], rows[i + 1], false)
    end
  end
  note_ranked(state, unpublished)
  sweep_holders(state)
end

-- Bounded, at most once a second, by the first caller of each release that ranks workers.
local function sweep(state)
  local swept_at, ranked_at = meta_time(state, 'swept_at', 0), meta_time(state, 'ranked_at', 0)
  if state.now - swept_at < SWEEP_EVERY_MS and state.now - ranked_at < SWEEP_EVERY_MS then return end
  set_meta_time(state, 'swept_at', state.now)
  sweep_fleet(state, swept_at)
end

-- The verdict of the owner that keeps `incarnation` from its name, or nil. `verdict`: the claim of the owner, false if
-- there is none; `claim`: that of `incarnation`.
local function owner_verdict(state, incarnation, worker_id, number, verdict, claim)
  if verdict == claim then return nil end
  local owner = read_verdict(verdict)
  if not owner or owner == incarnation then return nil end
  local owner_id, owner_number = worker_of(owner)
  if owner_id ~= worker_id then return nil end
  local row = redis.call('HGET', state.fleet, owner)
  if newer(owner_number, number) then
    if row and lease_state(row, state.now) == 'live' then return verdict end
    retire(state, owner)
  else
    fence_incarnation(state, owner, claim)
  end
  return nil
end

-- Drops `verdict`, which an earlier heartbeat returned: its signature is not from this deployment, as the caller found.
local function drop_forged(state, incarnation, worker_id, verdict)
  if redis.call('HGET', state.owner, worker_id) == verdict then
    redis.call('HDEL', state.owner, worker_id)
    redis.call('HDEL', state.fleet, read_verdict(verdict) or '')
    state.dropped = state.dropped + 1
  end
  if verdict_on(state, incarnation) == verdict then
    redis.call('UNLINK', fence_key(state, incarnation))
    state.dropped = state.dropped + 1
  end
end

-- `links`: text as in keys.py. Replaces what was there.
local function write_links(key, links)
  if links == '' then
    redis.call('UNLINK', key)
  else
    redis.call('SET', key, links, 'PX', INDEX_TTL_MS)
  end
end

local FIELDS = 11 -- first of the readable fields among the arguments of a heartbeat

-- Whether Redis has the description with this digest. Under its key nothing but a hash stays.
local function is_described(state, worker_id, digest)
  local key = state.prefix .. 'worker:' .. worker_id
  local known = redis.pcall('HGET', key, 'described')
  if type(known) == 'table' then drop_unless(key, 'hash') end
  return known == digest
end

-- Writes the row of `incarnation`. `owns`: its claim to the name is there. Returns whether Redis has the description of the
-- heartbeat `args`.
local function write_row(state, args, incarnation, worker_id, owns)
  local before = redis.call('HGET', state.fleet, incarnation)
  local known = is_described(state, worker_id, args[10])
  if not (before and owns and known) or lease_state(before, state.now) ~= 'live' then note_change(state, incarnation) end
  if not owns then redis.call('HSET', state.owner, worker_id, args[3]) end
  local report_ms = state.now - tonumber(args[7])
  local standing = standing_reservations(before, state.now, report_ms)
  local row = struct.pack('<dd', state.now + LEASE_MS, report_ms) .. args[6] .. standing
  redis.call('HSET', state.fleet, incarnation, row)
  local worker = row_changed(state, incarnation, before, row)
  if worker.live and (args[FIELDS] or not worker.publishes) then
    keep_ranks(state, worker)
    note_publisher(state.prefix, incarnation)
    worker.publishes = true
  end
  return known
end

-- Writes what most heartbeats do not repeat: the readable hash, links, and times to live.
local function write_description(state, args, incarnation, worker_id, number)
  local described = state.prefix .. 'worker:' .. worker_id
  redis.call('UNLINK', described)
  redis.call('HSET', described, 'described', args[10], 'incarnation', incarnation, 'number', number, unpack(args, FIELDS))
  redis.call('PEXPIRE', described, DESCRIBED_TTL_MS)
  redis.call('PEXPIRE', state.prefix .. 'blocks:' .. incarnation, INDEX_TTL_MS)
  redis.call('PEXPIRE', state.prefix .. 'cursor:' .. incarnation, INDEX_TTL_MS)
  redis.call('PEXPIRE', state.prefix .. 'host:' .. incarnation, INDEX_TTL_MS)
  write_links(state.prefix .. 'links:' .. incarnation, args[8])
  for _, key in ipairs({state.fleet, state.owner, state.meta}) do
    redis.call('PEXPIRE', key, FLEET_TTL_MS)
  end
end

-- The signed claims of workers to their names; the caller checks the signatures. Claims of unregistered workers are
-- dropped.
local function claims(state)
  local found, entries = {}, redis.call('HGETALL', state.owner)
  local more = #entries / 2 > redis.call('HLEN', state.fleet)
  for i = 1, #entries, 2 do
    local incarnation = read_verdict(entries[i + 1])
    if not incarnation or (more and redis.call('HEXISTS', state.fleet, incarnation) == 0) then
      redis.call('HDEL', state.owner, entries[i])
    elseif #found < MAX_WORKERS then
      found[#found + 1] = entries[i + 1]
    end
  end
  return found
end

-- Adds to `reply` what the caller has missed of the registered workers since generation `since`: those that joined or
-- changed, as claims, and those that left; or the claims of all.
local function add_members(state, reply, since)
  local changed = changed_since(state, since)
  if not changed then
    reply.members = claims(state)
    return
  end
  reply.joined, reply.left = {}, {}
  for _, incarnation in ipairs(changed) do
    local claim = redis.call('HGET', state.owner, (worker_of(incarnation)))
    if read_verdict(claim) == incarnation then
      reply.joined[#reply.joined + 1] = claim
    else
      reply.left[#reply.left + 1] = incarnation
    end
  end
end

-- heartbeat: register or renew, atomically. The newest number of a worker_id wins.
-- ARGV: 1 prefix, 2 incarnation, 3 claim to the name (a verdict, see state.lua), 4 epoch seed, 5 generation known to the
--       caller, 6 row payload, 7 age of the load report in ms, 8 links from here (as text, see keys.py), 9 a verdict that
--       the caller has found forged, or '', 10 digest of what readers need at once, 11… field, value, … of the readable
--       hash; without them the description of an earlier heartbeat stays
-- Returns msgpack {status = renewed | fenced | full, verdict, epoch, generation, cursor, workers, undescribed, joined,
--                  left, members, dropped}.
--   verdict: why it is fenced, for the caller to check; cursor: revision of the index of this incarnation, -1 if there is
--   none; workers: number of rows; undescribed: the next heartbeat has to bring the description.
--   If the generation differs from that of the caller: joined, the claims of workers that joined or changed, and left,
--   the incarnations that left; or, if that is not known, members, the claims of all.
local function heartbeat(keys, args)
  local state = open(keys, args)
  local incarnation = args[2]
  local worker_id, number = worker_of(incarnation)
  if not worker_id or #args[6] ~= PAYLOAD_BYTES or read_verdict(args[3]) ~= incarnation then
    return redis.error_reply('ERR heartbeat of a malformed incarnation, claim or row')
  end
  touch(state, args[4])
  sweep(state)
  if args[9] ~= '' then drop_forged(state, incarnation, worker_id, args[9]) end
  local claim = redis.call('HGET', state.owner, worker_id)
  local verdict = verdict_on(state, incarnation)
    or owner_verdict(state, incarnation, worker_id, number, claim, args[3])
  if verdict then return cmsgpack.pack({status = 'fenced', verdict = verdict}) end
  if state.count >= MAX_WORKERS and redis.call('HLEN', state.fleet) >= MAX_WORKERS
      and redis.call('HEXISTS', state.fleet, incarnation) == 0 then
    return cmsgpack.pack({status = 'full'})
  end
  local known = write_row(state, args, incarnation, worker_id, claim == args[3])
  if args[FIELDS] then write_description(state, args, incarnation, worker_id, number) end
  local generation = generation_of(state)
  local reply = {
    status = 'renewed', epoch = epoch_of(state), generation = generation, workers = state.count,
    undescribed = not known and not args[FIELDS],
    cursor = cursor_of(state.prefix .. 'blocks:' .. incarnation, state.prefix .. 'cursor:' .. incarnation),
    dropped = state.dropped,
  }
  if generation ~= tonumber(args[5]) then add_members(state, reply, tonumber(args[5])) end
  return cmsgpack.pack(reply)
end

-- fence: an incarnation has left, or was found dead. Idempotent.
-- ARGV: 1 prefix, 2 incarnation, 3 verdict. Returns 1.
local function fence(keys, args)
  if not read_verdict(args[3]) then return redis.error_reply('ERR a malformed verdict') end
  fence_incarnation(open(keys, args), args[2], args[3])
  return 1
end

-- The readable hash of a live incarnation; nil, which is counted, if it has none.
local function described_by(state, worker_id, incarnation)
  local described = state.prefix .. 'worker:' .. worker_id
  local found = redis.pcall('HGET', described, 'incarnation')
  if type(found) == 'table' then state.dropped = state.dropped + drop_unless(described, 'hash') end
  if found == incarnation and redis.call('HLEN', described) <= MAX_ROW_FIELDS then
    return redis.call('HGETALL', described)
  end
  state.dropped = state.dropped + 1
  return nil
end

local function live_incarnations(state)
  local found, rows, known = {}, redis.call('HGETALL', state.fleet), kept_fleet(state.prefix).workers
  for i = 1, #rows, 2 do
    local kind = lease_state(rows[i + 1], state.now)
    -- Rows are decoded under names of incarnations alone.
    if kind == 'malformed' or not (known[rows[i]] or worker_of(rows[i])) then
      state.dropped = state.dropped + 1
    elseif kind == 'live' then
      found[#found + 1] = rows[i]
    end
  end
  return found
end

-- The readable hashes of those of `names` that are live.
local function descriptions(state, names)
  local found = {}
  for _, name in ipairs(names) do
    local worker_id, row = worker_of(name), redis.call('HGET', state.fleet, name)
    if worker_id and row and lease_state(row, state.now) == 'live' then
      found[#found + 1] = described_by(state, worker_id, name)
    end
  end
  return found
end

-- changes: what a reader has missed since its last call. It describes only named incarnations, so no call takes long.
-- ARGV: 1 prefix, 2 epoch seed, 3 generation of the last call, 4 '1' to list all live incarnations, 5 number of
--       incarnations to describe, then these, then incarnations that the caller has and no list contains.
-- Returns msgpack {epoch, generation, dropped, changed = {incarnation, …}, listed = {incarnation, …},
--                  workers = {{field, value, …}, …}, fenced = {{incarnation, verdict}, …}}.
--   changed: since generation ARGV[3], whether live or not; nil if that is not known, and then any may have changed
--   listed: all live ones, if ARGV[4] is '1' or `changed` is nil; else nil
--   workers: readable hashes of those to describe that are live
--   fenced: those of the last arguments with a verdict, whose signature the caller checks
local function changes(keys, args)
  local state = open(keys, args)
  local noted = touch(state, args[2])
  sweep(state)
  local changed, last, fenced = changed_since(state, tonumber(args[3])), 5 + tonumber(args[5]), {}
  local reply = {
    epoch = epoch_of(state), generation = generation_of(state), changed = changed,
    listed = (not changed or args[4] == '1') and live_incarnations(state) or nil,
    workers = descriptions(state, {unpack(args, 6, last)}),
  }
  if noted then redis.call('PEXPIRE', state.changes, FLEET_TTL_MS) end
  for i = last + 1, #args do
    local verdict = verdict_on(state, args[i])
    if verdict then fenced[#fenced + 1] = {args[i], verdict} end
  end
  reply.fenced, reply.dropped = fenced, state.dropped
  return cmsgpack.pack(reply)
end

-- endings: verdicts alone, which a gateway reads several times in a second for each request of a lost worker.
-- ARGV: 1 prefix, then incarnations. Returns msgpack {{incarnation, verdict}, …}, of those that have one; the caller
--       checks their signatures.
local function endings(keys, args)
  local state, found = open(keys, args), {}
  for i = 2, #args do
    local verdict = verdict_on(state, args[i])
    if verdict then found[#found + 1] = {args[i], verdict} end
  end
  return cmsgpack.pack(found)
end

register('heartbeat', heartbeat)
register('fence', fence)
register('changes', changes)
register('endings', endings)
