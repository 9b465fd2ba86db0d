-- One routing decision: match, price, choose, reserve. One round trip, atomic, so that a burst through
-- many gateways sees each other's reservations.

local function read_query(args)
  local exclude = {}
  for i = 10, #args do exclude[args[i]] = true end
  local prompt_tokens, output_tokens = tonumber(args[3]), tonumber(args[4])
  return {
    model = args[2], prompt_tokens = prompt_tokens, room_tokens = prompt_tokens + output_tokens,
    block_size = tonumber(args[5]), local_prefill_tokens = tonumber(args[6]), chain = args[8],
    others = tonumber(args[9]), exclude = exclude,
  }
end

-- Prefill ends and decode ends of one compat hash: workers of different hashes are never paired.
local function group_of(groups, compat)
  local group = groups[compat]
  if not group then
    group = {members = {}, prefills = {}, decodes = {}}
    groups[compat] = group
  end
  return group
end

local function add(group, worker)
  local role = worker.role
  group.members[#group.members + 1] = worker
  worker.computes = role ~= ROLE_DECODE
  if role ~= ROLE_DECODE then group.prefills[#group.prefills + 1] = worker end
  if role ~= ROLE_PREFILL then group.decodes[#group.decodes + 1] = worker end
end

-- By compat hash, workers of the model that can hold the prompt, with matched prompt tokens and prices.
local function eligible(state, query)
  local groups = {}
  local search = chain_search(query.chain)
  local prompt_tokens, block_size, exclude = query.prompt_tokens, query.block_size, query.exclude
  for worker in live_workers(state) do
    if worker.model == query.model and worker.context_length > prompt_tokens and not exclude[worker.incarnation] then
      -- Pages of another size than the chain's cannot match.
      local blocks = worker.page_size == block_size and search(state, worker.blocks) or 0
      local matched = blocks * block_size
      price(worker, matched < prompt_tokens and matched or prompt_tokens, query)
      add(group_of(groups, worker.compat), worker)
    end
  end
  return groups
end

-- A decode worker computes the prompt itself when no more than that is missing, or when nobody else could.
-- One that no prefill worker can hand to, while others have some, differs from the rest of the fleet, and waits.
local function may_serve_alone(worker, group, query, any_whole)
  return worker.role == ROLE_BOTH or not any_whole
    or (#group.prefills > 0 and worker.missing <= query.local_prefill_tokens)
end

-- Ends that a good pair can be made of: cheap by themselves and over the links that they typically have.
local function promising(group)
  local least = math.huge
  for _, decode in ipairs(group.decodes) do
    if decode.missing < least then least = decode.missing end
  end
  for _, prefill in ipairs(group.prefills) do
    prefill.send_s = prefill.compute_s + least * prefill.transfer_token_s
  end
  local prefills = shortlist(group.prefills, 'send_s', PAIR_ENDS)
  local typical = math.huge
  for _, prefill in ipairs(prefills) do typical = math.min(typical, prefill.transfer_token_s) end
  for _, decode in ipairs(group.decodes) do
    decode.receive_s = decode.hold_s + decode.missing * typical
  end
  return prefills, shortlist(group.decodes, 'receive_s', PAIR_ENDS)
end

-- The cheapest pair of a group, one of those within TIE_S at random; nil when there is none.
-- Prices are kept apart from their pairs, which are made into a table once one is chosen.
local function best_pair(group)
  local prefills, decodes = promising(group)
  local costs, token_s, best = {}, {}, math.huge
  for _, prefill in ipairs(prefills) do
    local links = links_of(prefill)
    for _, decode in ipairs(decodes) do
      local link_s = links[decode.incarnation] or prefill.transfer_token_s
      local cost = prefill.compute_s + transfer(decode, link_s) + decode.hold_s
      -- The same worker at both ends is "alone" with a transfer added, and "alone" is an option of its own.
      if prefill == decode then cost = math.huge end
      costs[#costs + 1], token_s[#costs + 1] = cost, link_s
      if cost < best then best = cost end
    end
  end
  local ties = {}
  for i, cost in ipairs(costs) do
    if cost <= best + TIE_S and cost < math.huge then ties[#ties + 1] = i end
  end
  if #ties == 0 then return nil end
  group.ends = {prefills = prefills, decodes = decodes, costs = costs, token_s = token_s}
  return pair_at(group.ends, ties[math.random(#ties)])
end

local function consider_fetches_of(group, query, any_whole)
  for _, decode in ipairs(group.decodes) do
    decode.alone = may_serve_alone(decode, group, query, any_whole)
    decode.computes = decode.computes or decode.alone
  end
  consider_fetches(group.members, query)
end

local function best_alone(group)
  local able = {}
  for _, decode in ipairs(group.decodes) do
    if decode.alone then able[#able + 1] = decode end
  end
  if #able == 0 then return nil end
  return alone(cheapest(able, 'alone_s'), group)
end

-- The best "alone" and the best pair of each compat hash.
local function options(groups, query)
  local found, any_whole = {}, false
  for _, group in pairs(groups) do any_whole = any_whole or (#group.prefills > 0 and #group.decodes > 0) end
  for _, group in pairs(groups) do
    consider_fetches_of(group, query, any_whole)
    found[#found + 1] = best_alone(group)
    if #group.prefills > 0 and #group.decodes > 0 then found[#found + 1] = best_pair(group) end
  end
  return found
end

-- {worker, queue tokens, sequences, room tokens} for each worker of the choice.
local function claims_of(choice, query)
  local computing = choice.prefill or choice.decode
  local missing = missing_after(computing.known, query)
  if not choice.prefill then return {{choice.decode, missing, 1, query.room_tokens}} end
  return {{choice.prefill, missing, 0, query.prompt_tokens}, {choice.decode, 0, 1, query.room_tokens}}
end

local function reserve(state, claims)
  local bucket = state.now - state.now % RESERVATION_BUCKET_MS
  for _, claim in ipairs(claims) do
    local worker = claim[1]
    redis.call('HSET', state.fleet, worker.incarnation,
      with_reservation(worker.row, state.now, bucket, claim[2], claim[3], claim[4]))
    claim[1] = worker.incarnation
  end
  return {bucket = bucket, claims = claims}
end

-- route_and_reserve
-- ARGV: 1 prefix, 2 model (8-byte digest), 3 prompt tokens, 4 output tokens to keep room for, 5 block size of
--       the chain, 6 local prefill tokens, 7 random seed, 8 chain (16-byte digests, concatenated),
--       9 how many of the options that are not taken are told, 10… incarnations to leave out
-- Returns msgpack {status = chosen | none, chosen = {decode, prefill, degraded, matched, decode_matched, fetch, terms},
--                  passed_over, reservation, dropped}.
--   matched: prompt tokens found on the worker that computes the prompt; decode_matched: on the decode worker.
--   fetch: {source, tokens, seconds} of a prefix that it had better bring from another worker; nil if none.
--   degraded: the decode worker computes it because no prefill worker could.
--   passed_over: {the cheapest others, as `chosen`, and how many more there were}; nil when none are asked for.
local function route_and_reserve(keys, args)
  local state = open(keys, args)
  math.randomseed(tonumber(args[7]))
  local query = read_query(args)
  local groups = eligible(state, query)
  local found = options(groups, query)
  if #found == 0 then return cmsgpack.pack({status = 'none', dropped = state.dropped}) end
  local choice = cheapest(found, 'cost')
  return cmsgpack.pack({
    status = 'chosen', chosen = described(choice, query),
    passed_over = query.others > 0 and passed_over(groups, choice, query, query.others) or nil,
    reservation = reserve(state, claims_of(choice, query)), dropped = state.dropped,
  })
end

-- release: take back a reservation, when the attempt ended before the worker reported it. What no longer
-- counts is left alone.
-- ARGV: 1 prefix, 2 bucket, then per worker: incarnation, queue tokens, sequences, room tokens. Returns 1.
local function release(keys, args)
  local state = open(keys, args)
  for i = 3, #args, 4 do
    local row = redis.call('HGET', state.fleet, args[i])
    if row and well_sized(row) then
      redis.call('HSET', state.fleet, args[i], with_reservation(row, state.now, tonumber(args[2]),
        -tonumber(args[i + 1]), -tonumber(args[i + 2]), -tonumber(args[i + 3])))
    end
  end
  return 1
end

register('route_and_reserve', route_and_reserve)
register('release', release)
