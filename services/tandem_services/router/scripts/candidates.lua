-- The workers that a decision prices: few in a large fleet, so that a decision costs the same in any.
--
-- Of each compat hash: holders of a long prefix of the prompt, in the index or in flight, of which those that promise to
-- be cheapest and the longest; the least loaded of each role; and one of each at random. Of a model with at most ALL_UP_TO
-- workers: all. Which of the candidates is the cheapest is found as in a small fleet.

local MAX_KINDS = 16 -- compat hashes of one model that a decision looks at: the ones described last

-- Whether `worker`, decoded, may take the prompt of the query.
local function may_take(worker, query)
  return worker.live and worker.model == query.model and worker.context_length > query.prompt_tokens
    and not query.exclude[worker.incarnation]
end

-- The worker of `incarnation`, by its row; nil if it has none.
local function current(state, incarnation)
  local row = redis.call('HGET', state.fleet, incarnation)
  return row and decoded(state, incarnation, row) or nil
end

-- As it was decoded last, where its lease and reservations still are as they were: enough to compare holders.
local function lately(state, incarnation)
  local worker = kept_fleet(state.prefix).workers[incarnation]
  if worker and worker.live and state.now < worker.till then return worker end
  return current(state, incarnation)
end

-- `chosen` is a list of workers, each once.
local function choose(chosen, worker)
  if chosen[worker] then return end
  chosen[worker], chosen[#chosen + 1] = true, worker
end

-- Whether `worker` belongs to the rank `key` of `keys`.
local function belongs(worker, keys, key)
  return worker.live and worker.compat == keys.compat and worker.model == keys.model
    and worker.role ~= (key == keys.prefill and ROLE_DECODE or ROLE_PREFILL)
end

-- Chooses up to `limit` workers of the rank `key` that may take the prompt, from the position `first`. Names in `except`,
-- if it is not nil, are passed over, and names without a live row of this rank are dropped from it. Returns the position
-- after the last one.
local function choose_ranked(state, query, chosen, keys, key, first, limit, except)
  local page = math.min(limit, MAX_RANKED_PAGE)
  while limit > 0 do
    local names = ranked(state, 'ZRANGE', key, first, first + page - 1)
    for _, name in ipairs(names) do
      local passed = query.exclude[name] or except and except[name]
      local worker = not passed and current(state, name)
      if passed then
        first = first + 1
      elseif worker and belongs(worker, keys, key) then
        first = first + 1
        if may_take(worker, query) then
          choose(chosen, worker)
          limit = limit - 1
          if limit == 0 then return first end
        end
      else
        ranked(state, 'ZREM', key, name)
      end
    end
    if #names < page then return first end
    page = math.min(2 * page, MAX_RANKED_PAGE)
  end
  return first
end

-- Positions of the named blocks that are sampled, in order.
local function sampled_positions(query)
  local every, positions = sampling_of(query.block_size), {}
  for position = 1, query.named do
    if string.byte(query.chain, position * DIGEST_BYTES) % every == 0 then positions[#positions + 1] = position end
  end
  return positions
end

-- Tags of the holders of a named block.
local function holders_at(state, query, position)
  local digest = query.digest(position)
  return read_holders(bucket_of(state.prefix, digest), digest)
end

-- Index of the last of `positions` whose block a worker has; 0 if there is none. A worker that has a block has all blocks
-- before it.
local function last_held(state, query, positions)
  local low, high = 0, #positions
  while low < high do
    local middle = math.ceil((low + high) / 2)
    if holders_at(state, query, positions[middle]) ~= '' then low = middle else high = middle - 1 end
  end
  return low
end

-- `meet(name, position)`, until it returns true, for each worker with a block of the prompt in flight or in the index:
-- with the longest prefixes first, then back in growing steps. The first one of a list is drawn.
local function each_holder(state, query, meet)
  local sets = state.prefix .. 'blocks:'
  for blocks, position in pairs(query.in_flight or {}) do
    if string.sub(blocks, 1, #sets) == sets and meet(string.sub(blocks, #sets + 1), position) then return end
  end
  local positions, step = sampled_positions(query), 1
  local at = last_held(state, query, positions)
  while at >= 1 do
    local tags = holders_at(state, query, positions[at])
    local count = #tags / TAG_BYTES
    local first = count > 0 and math.random(count) or 0
    local gone, enough = false, false
    for next_one = 1, count do
      local tag_at = (first + next_one) % count * TAG_BYTES
      local name = named_by(state, string.sub(tags, tag_at + 1, tag_at + TAG_BYTES))
      gone, enough = gone or not name, name and meet(name, positions[at])
      if enough then break end
    end
    if gone then forget_gone(state, query.digest(positions[at]), tags) end
    if enough then return end
    at, step = at - step, step * 2
  end
end

-- At most MET_HOLDERS holders that may take the prompt, in groups by compat hash. `held` of each: the prompt tokens that
-- it has at least; `compute_s` and `hold_s`: what it promises to cost at either end of a pair.
local function holders_of(state, query)
  local groups, met, count = {}, {}, 0
  each_holder(state, query, function(name, position)
    if met[name] then return false end
    met[name] = true
    local worker = lately(state, name)
    if not worker or not may_take(worker, query) or worker.page_size ~= query.block_size then return false end
    worker.held = query.tokens_at(position)
    local missing, alone_s = missing_after(worker.held, query), worker.role == ROLE_BOTH and worker.load_s or 0
    worker.compute_s = worker.queue_s + missing * worker.work_s + alone_s
    worker.hold_s = worker.load_s + (worker.full and NO_ROOM_S or 0) + missing * worker.transfer_token_s
    add_to_group(groups, worker)
    count = count + 1
    return count == MET_HOLDERS
  end)
  return groups
end

-- Those of `group`, which are holders, that promise to be the cheapest at either end, and the one with the longest
-- prefix: a source, if nothing else.
local function choose_holders(state, query, chosen, group)
  local longest = group.members[1]
  for _, worker in ipairs(group.members) do
    local further, as_far = worker.held > longest.held, worker.held == longest.held
    if further or as_far and worker.compute_s < longest.compute_s then longest = worker end
  end
  for _, some in ipairs({{longest}, shortlist(group.prefills, 'compute_s', PAIR_ENDS),
    shortlist(group.decodes, 'hold_s', PAIR_ENDS)}) do
    for _, worker in ipairs(some) do
      local now = current(state, worker.incarnation)
      if now and may_take(now, query) then choose(chosen, now) end
    end
  end
end

local function has_capacity(worker, query)
  return worker.role ~= ROLE_PREFILL and not worker.full and worker.room_tokens >= query.room_tokens
end

-- Chooses one of a rank at random.
local function choose_random(state, query, chosen, keys, key)
  local count = ranked(state, 'ZCARD', key)
  if count > 0 then choose_ranked(state, query, chosen, keys, key, math.random(count) - 1, 1) end
end

-- Chooses few workers of one compat hash: `ends` of each role by load. `holders`: group of its holders, nil if there are
-- none.
local function choose_few(state, query, chosen, keys, holders, ends)
  if holders then choose_holders(state, query, chosen, holders) end
  choose_ranked(state, query, chosen, keys, keys.prefill, 0, ends)
  local passed = choose_ranked(state, query, chosen, keys, keys.decode, 0, ends)
  if query.absent then -- some have the adapter of the prompt
    choose_ranked(state, query, chosen, keys, keys.prefill, 0, PAIR_ENDS, query.absent)
    choose_ranked(state, query, chosen, keys, keys.decode, 0, PAIR_ENDS, query.absent)
  end
  local able = 0
  for _, worker in ipairs(chosen) do
    if worker.compat == keys.compat and has_capacity(worker, query) then able = able + 1 end
  end
  if able < 2 then choose_ranked(state, query, chosen, keys, keys.decode, passed, MORE_DECODES) end
  choose_random(state, query, chosen, keys, keys.prefill)
  choose_random(state, query, chosen, keys, keys.decode)
end

-- Keys of the ranks of each compat hash of the model.
local function ranks_of(state, query)
  local found, prefix = {}, state.prefix
  for _, compat in ipairs(ranked(state, 'ZRANGE', kinds_key(prefix, query.model), -MAX_KINDS, -1)) do
    if #compat == 16 then found[#found + 1] = rank_keys(prefix, query.model .. compat) end
  end
  return found
end

-- Number of names in the rank `key`. One with more than there are workers was not written by them, and is dropped.
local function size_of_rank(state, key)
  local count = ranked(state, 'ZCARD', key)
  if count <= MAX_WORKERS then return count end
  redis.call('UNLINK', key)
  state.dropped = state.dropped + 1
  return 0
end

-- Number of names in the ranks, in which a worker that does both is twice.
local function names_in(state, ranks)
  local count = 0
  for _, keys in ipairs(ranks) do
    count = count + size_of_rank(state, keys.prefill) + size_of_rank(state, keys.decode)
  end
  return count
end

-- All names in the ranks, each once, in an order that does not depend on loads.
local function all_names(state, ranks)
  local names, known = {}, {}
  for _, keys in ipairs(ranks) do
    for _, key in ipairs({keys.prefill, keys.decode}) do
      for _, name in ipairs(ranked(state, 'ZRANGE', key, 0, -1)) do
        if not known[name] then known[name], names[#names + 1] = true, name end
      end
    end
  end
  table.sort(names)
  return names
end

-- Workers of a release that writes no holders are found by their sets alone, so up to MIXED_UP_TO are priced while there
-- are any.
local function all_publish(state)
  return meta_field(state, 'unpublished') == '0'
end

-- Those of `names` that may take the prompt. Those without a row are dropped from `ranks`.
local function choose_named(state, query, names, ranks)
  local chosen = {}
  for _, name in ipairs(names) do
    local worker = current(state, name)
    if worker and may_take(worker, query) then choose(chosen, worker) end
    for _, keys in ipairs(worker and {} or ranks) do
      ranked(state, 'ZREM', keys.prefill, name)
      ranked(state, 'ZREM', keys.decode, name)
    end
  end
  return chosen
end

local function choose_candidates(state, query)
  if query.allowed then return choose_named(state, query, query.allowed, {}) end
  local ranks = ranks_of(state, query)
  local all_up_to, ends = ALL_UP_TO, PAIR_ENDS
  if not all_publish(state) then all_up_to, ends = math.max(ALL_UP_TO, MIXED_UP_TO), math.ceil(MIXED_UP_TO / 2) end
  if names_in(state, ranks) <= 2 * all_up_to then
    local names = all_names(state, ranks)
    if #names <= all_up_to then return choose_named(state, query, names, ranks) end
  end
  local chosen, holders = {}, holders_of(state, query)
  for _, keys in ipairs(ranks) do choose_few(state, query, chosen, keys, holders[keys.compat], ends) end
  return chosen
end

-- Whether the ranks of the model of the query may be written again: once in RANK_AGAIN_MS, and ten times where workers
-- have joined or left since, or those of another model were written.
local function may_rank_again(state, query)
  local passed = state.now - meta_time(state, 'missed_at', 0)
  local missed = query.model .. string.format('%.0f', generation_of(state))
  local again = meta_field(state, 'missed') ~= missed
  if passed < RANK_AGAIN_MS and not (again and passed >= RANK_AGAIN_MS / 10) then return false end
  set_meta_time(state, 'missed_at', state.now)
  set_meta(state, 'missed', missed)
  return true
end

-- Groups of candidates by compat hash. Where ranks name no worker, they are written again, unless that was just done.
local function candidates(state, query)
  local chosen = choose_candidates(state, query)
  if #chosen == 0 and not query.allowed and may_rank_again(state, query) then
    rank_model(state, query.model)
    chosen = choose_candidates(state, query)
  end
  local groups, found = {}, {}
  for _, worker in ipairs(chosen) do
    local known = groups[worker.compat]
    add_to_group(groups, worker)
    if not known then found[#found + 1] = groups[worker.compat] end
  end
  return found
end
