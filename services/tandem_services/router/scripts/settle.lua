-- Which workers are worth looking at: what each has of the prompt is found out for those that may be among the cheapest.
--
-- A worker is priced as if it had as much of the prompt as is not ruled out, so it never costs less. To be cheaper than
-- the cheapest so far it must have some part of that, which follows from its load, and one look tells whether it has.
-- Only who has is settled, so the choice is the one that everybody's exact price would give.

-- A decode worker computes the prompt itself when no more than that is missing, or when nobody else could.
-- One that no prefill worker can hand to, while others have some, differs from the rest of the fleet, and waits.
local function may_serve_alone(worker, group, query)
  return worker.role == ROLE_BOTH or not query.any_whole
    or (#group.prefills > 0 and worker.missing <= query.local_prefill_tokens)
end

-- Price `worker` of `group` with `matched` prompt tokens cached, and the fetch by which it computes for less.
local function price_in_group(worker, matched, group, query)
  price(worker, matched, query)
  worker.alone = worker.role ~= ROLE_PREFILL and may_serve_alone(worker, group, query)
  if worker.alone or worker.role ~= ROLE_DECODE then
    for i = 1, #group.sources do consider(worker, group.sources[i], query) end
  end
end

-- Who has most of the prompt, exactly, and everybody's lowest price.
local function price_group(group, query)
  local members, tokens_at = group.members, query.tokens_at
  local sources = longest_matches(members, query.search)
  for i = 1, #sources do sources[i].matched = tokens_at(sources[i].low) end
  group.sources, group.longest = sources, sources[1] and sources[1].matched or 0
  for i = 1, #members do price_in_group(members[i], tokens_at(members[i].high), group, query) end
end

-- Find out what `worker` has of the prompt, and its price.
local function settle(worker, group, query)
  query.search(worker, worker.low, worker.high)
  local matched = query.tokens_at(worker.low)
  if matched ~= worker.matched then price_in_group(worker, matched, group, query) end
end

-- Prompt tokens of which a worker must have more than this to cost less than `bound` seconds as the end that computes:
-- where it fetches, the rest of the longest match may come for nothing but the copy.
local function enough_to_compute(worker, bound, group, query)
  local left_s, longest = bound - worker.queue_s, group.longest
  local enough = query.prompt_tokens - left_s / worker.work_s
  if longest == 0 then return enough end
  return math.min(enough, longest - (left_s - (query.prompt_tokens - longest) * worker.work_s) / worker.copy_s)
end

-- Settle `worker` if it has more than `enough` prompt tokens, as far as one look tells. False if it has not.
local function settled_beyond(enough, worker, group, query)
  if worker.low == worker.high then return true end
  local least = query.position_before(enough)
  if least >= worker.low and least < worker.high then
    query.search(worker, least, least + 1)
    if query.tokens_at(worker.high) <= enough then return false end
  end
  settle(worker, group, query)
  return true
end

-- Positions of the `most` lowest of `values`, lowest first, infinite ones left out. Looked at from anywhere on, so that
-- which of equals is left to chance.
local function lowest_positions(values, most)
  local count, short, huge = #values, {}, math.huge
  local start = math.random(count)
  for step = 1, count do
    local position = (start + step) % count + 1
    local value, place = values[position], #short
    if value < huge and (place < most or value < values[short[place]]) then
      if place == most then place = place - 1 end
      while place > 0 and value < values[short[place]] do
        short[place + 1] = short[place]
        place = place - 1
      end
      short[place + 1] = position
    end
  end
  return short
end

-- The PAIR_ENDS of `workers` with the lowest cost, lowest first. None costs less than its value of `floors`;
-- `look(worker, bound)` settles it and tells its cost, or nil when that is not below `bound`.
local function lowest(workers, floors, look)
  local short, costs, looked, known = {}, {}, {}, {}
  local function take(position)
    local worker, place, bound = workers[position], #short, math.huge
    if place == PAIR_ENDS then bound = costs[place] end
    looked[position] = true
    local cost = floors[position] < bound and look(worker, bound)
    if not cost or cost >= bound then return end
    if place == PAIR_ENDS then place = place - 1 end
    while place > 0 and cost < costs[place] do
      short[place + 1], costs[place + 1] = short[place], costs[place]
      place = place - 1
    end
    short[place + 1], costs[place + 1] = worker, cost
  end
  -- Of those that are settled already, then of all, the best first, so that little is left to look at.
  local unknown, huge = false, math.huge
  for position = 1, #workers do
    local worker = workers[position]
    if worker.low == worker.high then
      known[position] = floors[position]
    else
      known[position], unknown = huge, true
    end
  end
  for _, position in ipairs(lowest_positions(known, PAIR_ENDS)) do take(position) end
  if not unknown then return short end
  for _, position in ipairs(lowest_positions(floors, PAIR_ENDS)) do
    if not looked[position] then take(position) end
  end
  for position = 1, #floors do
    if not looked[position] and (#short < PAIR_ENDS or floors[position] < costs[PAIR_ENDS]) then take(position) end
  end
  return short
end
