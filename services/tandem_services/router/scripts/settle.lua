-- Exact matches, only for workers that may be among the cheapest. To settle a worker is to determine its exact match.
--
-- A worker is first priced with the longest match that is not ruled out, so this price is a lower bound. To be cheaper
-- than the cheapest so far it needs a match of some length, which follows from its load, and one lookup shows whether it
-- has that. Only such workers are settled, so the choice equals the choice by exact prices of all workers.

-- Max. prompt tokens that a decode worker of `group` may compute itself: all of them if no prefill worker can. A group
-- without prefill workers, while other groups have some, differs from the rest of the fleet, and waits.
local function most_missing_alone(group, query)
  if not query.any_whole then return math.huge end
  return #group.prefills > 0 and query.local_prefill_tokens or 0
end

-- Prices `worker` of `group` with `matched` prompt tokens cached: `hold_s` and `missing` as the decoding end,
-- `compute_s` as the computing end, with a fetch if that is cheaper, and `alone_s` as both.
local function price(worker, matched, group, query)
  local missing, role, hold_s, is_alone = query.prompt_tokens - matched, worker.role, 0, false
  if missing < 1 then missing = 1 end
  worker.matched, worker.source = matched, false
  if role ~= ROLE_PREFILL then
    hold_s, is_alone = worker.load_s, role == ROLE_BOTH or missing <= group.most_alone
    if worker.full or query.room_tokens > worker.room_tokens then hold_s = hold_s + NO_ROOM_S end
    worker.hold_s, worker.missing, worker.alone = hold_s, missing, is_alone
    if role == ROLE_DECODE and not is_alone then return end
  end
  local known_s = missing * worker.work_s
  if group.longest > matched then
    known_s, worker.source, worker.fetch_s = cheapest_fetch(worker, matched, known_s, group.sources)
  end
  local compute_s = worker.queue_s + worker.back_s + known_s
  if worker.absent then compute_s = compute_s + absent_s(worker, worker.queue_s) end
  worker.compute_s = compute_s
  if is_alone then worker.alone_s = compute_s + hold_s end
end

-- Whether copies from host memory add nothing to the price of `worker`, whose match is known.
local function copies_nothing(worker)
  return worker.low == 0 or host_token_s(worker) == 0
end

-- The longest matches, exactly, and the lowest price of every worker: without copies from host memory.
local function price_group(group, query)
  local members, tokens_at, explained, in_flight = group.members, query.tokens_at, query.others > 0, query.in_flight
  local matches = longest_matches(members, query)
  -- Blocks in flight are not a source: they are not computed yet.
  for _, source in ipairs(matches) do source.held = tokens_at(source.low) end
  group.sources, group.longest = sources_of(matches, query), matches[1] and matches[1].held or 0
  group.most_alone = most_missing_alone(group, query)
  local most, tokens = 0, 0 -- those of the previous worker: mostly the same
  local absent = query.absent
  for i = 1, #members do
    local worker = members[i]
    worker.absent = absent and absent[worker.incarnation] or false
    local low, high = worker.low, worker.high
    local noted = in_flight and in_flight[worker.blocks]
    if noted and noted > low and worker.page_size == query.block_size then
      low, high = noted, noted > high and noted or high
      worker.low, worker.high = low, high
    end
    if worker.back_s > 0 then worker.back_s = 0 end
    if high ~= most then most, tokens = high, tokens_at(high) end
    price(worker, tokens, group, query)
    worker.settled = low == high and not explained and (low == 0 or copies_nothing(worker))
  end
end

-- Determines the exact match of `worker`, its part in host memory, and its price.
local function settle(worker, group, query)
  query.search(worker, 0)
  local matched = query.tokens_at(worker.low)
  worker.in_host = 0
  if query.others > 0 or not copies_nothing(worker) then
    worker.in_host = matched - query.tokens_at(query.on_device(worker))
    worker.back_s = worker.in_host * host_token_s(worker) * (1 + worker.waiting)
  end
  if matched ~= worker.matched or worker.back_s > 0 then price(worker, matched, group, query) end
  worker.settled = true
end

-- A worker needs a match of more than this many prompt tokens to cost less than `bound` seconds as the computing end.
-- With a fetch the rest of the longest match may cost no more than the copy.
local function enough_to_compute(worker, bound, group, query)
  local left_s, longest, prompt_tokens = bound - worker.queue_s, group.longest, query.prompt_tokens
  if worker.absent then left_s = left_s - absent_s(worker, worker.queue_s) end
  local enough = prompt_tokens - left_s / worker.work_s
  if longest == 0 then return enough end
  local fetching = longest - (left_s - (prompt_tokens - longest) * worker.work_s) / worker.copy_s
  return fetching < enough and fetching or enough
end

-- Settles `worker` unless one lookup shows that its match has at most `enough` prompt tokens; then returns false.
local function settled_beyond(enough, worker, group, query)
  if worker.settled then return true end
  if enough >= 0 then
    local least = enough * query.named_per_token
    least = least - least % 1
    if least >= worker.low and least < worker.high then query.look(worker, least + 1) end
    if worker.high <= least then return false end
  end
  settle(worker, group, query)
  return true
end

-- Positions of the `limit` lowest of the first `count` of `values`, lowest first, without infinite ones. The start is
-- random, so that the choice among equals is random.
local function lowest_positions(values, count, limit)
  local short, places, bound, huge = {}, 0, math.huge, math.huge
  local position = math.random(count)
  for _ = 1, count do
    position = position % count + 1
    local value = values[position]
    if value < bound then
      local place = places
      if place == limit then place = place - 1 else places = places + 1 end
      while place > 0 and value < values[short[place]] do
        short[place + 1] = short[place]
        place = place - 1
      end
      short[place + 1] = position
      bound = places == limit and values[short[limit]] or huge
    end
  end
  return short
end

-- The PAIR_ENDS of `workers` with the lowest cost, lowest first. Their values in `floors` are lower bounds, and exact for
-- settled workers; `look(worker, bound)` settles one and returns its cost, or false if that is not below `bound`.
local function lowest(workers, floors, look)
  local count, short, costs, places, unsettled, huge = #workers, {}, {}, 0, 0, math.huge
  local bound = huge -- cost of the last entry of a full list
  local function add(worker, cost)
    local place = places
    if place == PAIR_ENDS then place = place - 1 else places = places + 1 end
    while place > 0 and cost < costs[place] do
      short[place + 1], costs[place + 1] = short[place], costs[place]
      place = place - 1
    end
    short[place + 1], costs[place + 1] = worker, cost
    if places == PAIR_ENDS then bound = costs[PAIR_ENDS] end
  end
  local position = math.random(count) -- so that the choice among equals is random
  for _ = 1, count do
    position = position % count + 1
    local worker, cost = workers[position], floors[position]
    if not worker.settled then
      unsettled = unsettled + 1
    elseif cost < bound then
      add(worker, cost)
    end
  end
  if unsettled == 0 then return short end
  local function take(at)
    local worker = workers[at]
    local cost = not worker.settled and floors[at] < bound and look(worker, bound)
    if cost and cost < bound then add(worker, cost) end
  end
  -- While the list is not full, the most promising others first, so that few lookups remain.
  if bound == huge then
    for _, at in ipairs(lowest_positions(floors, count, PAIR_ENDS)) do take(at) end
  end
  for at = 1, count do
    if floors[at] < bound then take(at) end
  end
  return short
end
