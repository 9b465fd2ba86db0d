-- Which workers are worth looking at: what each has of the prompt is found out for those that may be among the cheapest.
--
-- A worker is priced as if it had as much of the prompt as is not ruled out, so it never costs less. To be cheaper than
-- the cheapest so far it must have some part of that, which follows from its load, and one look tells whether it has.
-- Only who has is settled, so the choice is the one that everybody's exact price would give.

-- How many prompt tokens may be missing on a decode worker of `group` that computes the prompt itself: as many as there
-- are when nobody else could. One that no prefill worker can hand to, while others have some, differs from the rest of
-- the fleet, and waits.
local function most_missing_alone(group, query)
  if not query.any_whole then return math.huge end
  return #group.prefills > 0 and query.local_prefill_tokens or 0
end

-- Price `worker` of `group` with `matched` prompt tokens cached: `hold_s` and `missing` as the end that decodes,
-- `compute_s` as the end that computes, with the fetch by which it does so for less, and `alone_s` as both.
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
  worker.compute_s = compute_s
  if is_alone then worker.alone_s = compute_s + hold_s end
end

-- Whether copies from host memory add nothing to the price of `worker`, of which it is known how much it has.
local function copies_nothing(worker)
  return worker.low == 0 or host_token_s(worker) == 0
end

-- Who has most of the prompt, exactly, and everybody's lowest price: nothing has to be copied from host memory.
local function price_group(group, query)
  local members, tokens_at, told, in_flight = group.members, query.tokens_at, query.others > 0, query.in_flight
  local matches = longest_matches(members, query)
  -- What is in flight is no source: it is not there yet.
  for _, source in ipairs(matches) do source.held = tokens_at(source.low) end
  group.sources, group.longest = sources_of(matches, query), matches[1] and matches[1].held or 0
  group.most_alone = most_missing_alone(group, query)
  local most, tokens = 0, 0 -- of the worker before: mostly the same
  for i = 1, #members do
    local worker = members[i]
    local low, high = worker.low, worker.high
    local noted = in_flight and in_flight[worker.blocks]
    if noted and noted > low and worker.page_size == query.block_size then
      low, high = noted, noted > high and noted or high
      worker.low, worker.high = low, high
    end
    if worker.back_s > 0 then worker.back_s = 0 end
    if high ~= most then most, tokens = high, tokens_at(high) end
    price(worker, tokens, group, query)
    worker.settled = low == high and not told and (low == 0 or copies_nothing(worker))
  end
end

-- Find out what `worker` has of the prompt and where, and its price.
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

-- Prompt tokens of which a worker must have more than this to cost less than `bound` seconds as the end that computes:
-- where it fetches, the rest of the longest match may come for nothing but the copy.
local function enough_to_compute(worker, bound, group, query)
  local left_s, longest, prompt_tokens = bound - worker.queue_s, group.longest, query.prompt_tokens
  local enough = prompt_tokens - left_s / worker.work_s
  if longest == 0 then return enough end
  local fetching = longest - (left_s - (prompt_tokens - longest) * worker.work_s) / worker.copy_s
  return fetching < enough and fetching or enough
end

-- Settle `worker` if it has more than `enough` prompt tokens, as far as one look tells. False if it has not.
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

-- Positions of the `most` lowest of the first `count` of `values`, lowest first, infinite ones left out. Looked at from
-- anywhere on, so that which of equals is left to chance.
local function lowest_positions(values, count, most)
  local short, places, bound, huge = {}, 0, math.huge, math.huge
  local position = math.random(count)
  for _ = 1, count do
    position = position % count + 1
    local value = values[position]
    if value < bound then
      local place = places
      if place == most then place = place - 1 else places = places + 1 end
      while place > 0 and value < values[short[place]] do
        short[place + 1] = short[place]
        place = place - 1
      end
      short[place + 1] = position
      bound = places == most and values[short[most]] or huge
    end
  end
  return short
end

-- The PAIR_ENDS of `workers` with the lowest cost, lowest first. None costs less than its value of `floors`, who is
-- settled costs exactly that; `look(worker, bound)` settles one and tells its cost, or false when that is not below
-- `bound`.
local function lowest(workers, floors, look)
  local count, short, costs, places, unsettled, huge = #workers, {}, {}, 0, 0, math.huge
  local bound = huge -- what the last of a whole list costs
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
  local position = math.random(count) -- so that which of equals is left to chance
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
  -- Of the others the best first while these are too few, so that little is left to look at.
  if bound == huge then
    for _, at in ipairs(lowest_positions(floors, count, PAIR_ENDS)) do take(at) end
  end
  for at = 1, count do
    if floors[at] < bound then take(at) end
  end
  return short
end
