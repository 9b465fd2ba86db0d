-- Workers by load, so that a decision finds the least loaded of any fleet without reading the others.
--
--   kinds:<model>                   ZSET  compat hash → Redis time at which a worker of it was described last
--   least:<model>:<compat>:prefill  ZSET  incarnation → seconds that a prompt of RANKED_TOKENS costs there, with the queue
--   least:<model>:<compat>:decode   ZSET  incarnation → seconds that one more sequence costs there, more without room
--
-- Model and compat hash in hex digits. A worker that does both is in both. A heartbeat writes the ranks of its worker, and
-- so does each reservation. Ranks select candidates, and prices are computed from rows, so a wrong or old rank costs the
-- choice of a better candidate until the next heartbeat, and a name without a live row is dropped by the decision that
-- meets it. Workers of a release without ranks are ranked by the sweep.

-- In a row: model and compat hash, after role, offer, page and context.
local MODEL_AT, MODEL_END, KIND_AT, KIND_END = 27, 34, 17, 50
local MAX_KEPT_KINDS = 1024
local LITTLE_ROOM = 8192 -- tokens: less is no room for a typical request

local function hex(bytes)
  return (string.gsub(bytes, '.', function(byte) return string.format('%02x', string.byte(byte)) end))
end

-- The model of `row`, of any size.
local function model_of(row)
  return string.sub(row, MODEL_AT, MODEL_END)
end

-- `made(prefix, name)`, which is kept.
local function kept_keys(prefix, name, made)
  local fleet = kept_fleet(prefix)
  local keys = fleet.ranks[name]
  if not keys then
    if fleet.ranks_count == MAX_KEPT_KINDS then fleet.ranks, fleet.ranks_count = {}, 0 end
    keys = made(prefix, name)
    fleet.ranks[name], fleet.ranks_count = keys, fleet.ranks_count + 1
  end
  return keys
end

local function made_kinds_key(prefix, model)
  return prefix .. 'kinds:' .. hex(model)
end

local function kinds_key(prefix, model)
  return kept_keys(prefix, model, made_kinds_key)
end

local function made_rank_keys(prefix, kind)
  local model, compat = string.sub(kind, 1, 8), string.sub(kind, 9)
  local both = prefix .. 'least:' .. hex(model) .. ':' .. hex(compat)
  return {
    prefill = both .. ':prefill', decode = both .. ':decode', kinds = kinds_key(prefix, model),
    model = model, compat = compat,
  }
end

-- Keys of the ranks of `kind`, the model and compat hash of a row.
local function rank_keys(prefix, kind)
  return kept_keys(prefix, kind, made_rank_keys)
end

-- `command` on a sorted set of ranks; of another type it is dropped and counted.
local function ranked(state, command, key, ...)
  local reply = redis.pcall(command, key, ...)
  if type(reply) == 'table' and reply.err then
    state.dropped = state.dropped + drop_unless(key, 'zset')
    reply = redis.call(command, key, ...)
  end
  return reply
end

-- Equal loads are in another order after each write, so the first of a rank are not always the same workers. The order
-- follows from name and time, and not from the calls before: a simulation has to be repeatable.
local function score(state, worker, seconds)
  local drawn = tonumber(string.sub(redis.sha1hex(worker.incarnation .. state.now), 1, 8), 16) / 4294967296
  return string.format('%.9g', seconds + drawn * TIE_S)
end

-- Writes the ranks of `worker`, which is live.
local function rank(state, worker)
  local keys, role = rank_keys(state.prefix, worker.model .. worker.compat), worker.role
  if role ~= ROLE_DECODE then
    local token_s = worker.work_s + (role == ROLE_PREFILL and worker.transfer_token_s or 0)
    local seconds = worker.queue_s + RANKED_TOKENS * token_s
    ranked(state, 'ZADD', keys.prefill, score(state, worker, seconds), worker.incarnation)
  end
  if role ~= ROLE_PREFILL then
    local no_room = worker.full or worker.room_tokens < LITTLE_ROOM
    ranked(state, 'ZADD', keys.decode, score(state, worker, worker.load_s + (no_room and NO_ROOM_S or 0)), worker.incarnation)
  end
end

-- Takes the worker of `row` from its ranks.
local function unrank(state, incarnation, row)
  if not row or not well_sized(row) then return end
  local keys = rank_keys(state.prefix, string.sub(row, MODEL_AT, KIND_END))
  ranked(state, 'ZREM', keys.prefill, incarnation)
  ranked(state, 'ZREM', keys.decode, incarnation)
end

-- The kind of `worker` is served, and its ranks are kept. Kinds of which no worker is described any more are dropped, and
-- so are those described in a future that no clock of Redis reaches soon: they would hide the others.
local function keep_ranks(state, worker)
  local keys = rank_keys(state.prefix, worker.model .. worker.compat)
  ranked(state, 'ZREMRANGEBYSCORE', keys.kinds, '-inf', string.format('(%.0f', state.now - DESCRIBED_TTL_MS))
  ranked(state, 'ZREMRANGEBYSCORE', keys.kinds, string.format('(%.0f', state.now + DESCRIBED_TTL_MS), '+inf')
  ranked(state, 'ZADD', keys.kinds, string.format('%.0f', state.now), worker.compat)
  redis.call('PEXPIRE', keys.kinds, FLEET_TTL_MS)
  redis.call('PEXPIRE', keys.prefill, FLEET_TTL_MS)
  redis.call('PEXPIRE', keys.decode, FLEET_TTL_MS)
end

-- The row of a worker has changed from `before`, false if it had none, to `row`. Returns the decoded worker.
local function row_changed(state, incarnation, before, row)
  local worker = decoded(state, incarnation, row)
  local moved = before and string.sub(before, KIND_AT, KIND_END) ~= string.sub(row, KIND_AT, KIND_END)
  if moved or not worker.live then unrank(state, incarnation, before) end
  if worker.live then rank(state, worker) end
  return worker
end
