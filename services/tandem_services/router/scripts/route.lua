-- One routing decision: match, price, choose, reserve. One atomic round trip, so that decisions of several gateways in a
-- burst include each other's reservations.

-- `tokens_at(n)`: prompt tokens in the first n named blocks of the chain; `named_per_token`: named blocks per token.
local function read_query(state, args)
  local exclude, absent, last_absent = {}, nil, 11 + 3 * tonumber(args[11])
  local last_allowed = last_absent + 1 + tonumber(args[last_absent + 1])
  for i = 12, last_absent, 3 do
    absent = absent or {}
    absent[args[i]] = {load_s = tonumber(args[i + 1]), evict_s = tonumber(args[i + 2])}
  end
  for i = last_allowed + 1, #args do exclude[args[i]] = true end
  local prompt_tokens, output_tokens, block_size = tonumber(args[3]), tonumber(args[4]), tonumber(args[5])
  local chain, blocks = args[8], tonumber(args[9])
  local named, step = math.min(math.floor(#chain / DIGEST_BYTES), MAX_NAMED_BLOCKS), 1
  while step * MAX_NAMED_BLOCKS < blocks do step = step * 2 end
  local digest, look, search, on_device = chain_search(state, chain)
  return {
    model = args[2], prompt_tokens = prompt_tokens, room_tokens = prompt_tokens + output_tokens,
    block_size = block_size, local_prefill_tokens = tonumber(args[6]), named = named,
    chain = chain, digest = digest, look = look, search = search, on_device = on_device,
    others = tonumber(args[10]), exclude = exclude, absent = absent,
    allowed = last_allowed > last_absent + 1 and {unpack(args, last_absent + 2, last_allowed)} or nil,
    tokens_at = function(position)
      if position == 0 then return 0 end
      local tokens = (position < named and position * step or blocks) * block_size
      return tokens < prompt_tokens and tokens or prompt_tokens
    end,
    named_per_token = 1 / (step * block_size),
  }
end

local sending, receiving = {}, {} -- seconds of the ends of one group, allocated once for all decisions

-- Ends of good pairs: cheap by themselves and over their typical links.
local function promising(group, query)
  local least, prompt_tokens, typical = missing_after(group.longest, query), query.prompt_tokens, math.huge
  local ends = group.prefills
  for i = 1, #ends do sending[i] = ends[i].compute_s + least * ends[i].transfer_token_s end
  local prefills = lowest(ends, sending, function(worker, bound)
    local sent_s = least * worker.transfer_token_s
    local enough = enough_to_compute(worker, bound - sent_s, group, query)
    return settled_beyond(enough, worker, group, query) and worker.compute_s + sent_s
  end)
  for _, prefill in ipairs(prefills) do typical = math.min(typical, prefill.transfer_token_s) end
  ends = group.decodes
  for i = 1, #ends do receiving[i] = ends[i].hold_s + absent_s(ends[i], 0) + ends[i].missing * typical end
  local decodes = lowest(ends, receiving, function(worker, bound)
    local held_s = worker.hold_s + absent_s(worker, 0)
    local enough = prompt_tokens - (bound - held_s) / typical
    return settled_beyond(enough, worker, group, query) and held_s + worker.missing * typical
  end)
  return prefills, decodes
end

-- The cheapest pair of a group, at random among those within TIE_S; nil if there is none.
-- Prices are kept in lists; only the chosen pair becomes a table.
local function best_pair(group, query)
  local prefills, decodes = promising(group, query)
  local costs, token_s, count, best = {}, {}, 0, math.huge
  for _, prefill in ipairs(prefills) do
    local links = links_of(prefill)
    for _, decode in ipairs(decodes) do
      local link_s = links[decode.incarnation] or prefill.transfer_token_s
      local cost = prefill.compute_s + transfer(decode, link_s) + decode.hold_s
      if decode.absent then cost = cost + absent_at_end(decode, prefill, query) end
      -- The same worker at both ends is "alone" plus a transfer, and "alone" is a separate option.
      if prefill == decode then cost = math.huge end
      count = count + 1
      costs[count], token_s[count] = cost, link_s
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

-- Settles every worker that may cost at most TIE_S more than the cheapest.
local function best_alone(group, query)
  local decodes, first = group.decodes, false
  for i = 1, #decodes do
    local worker = decodes[i]
    if worker.alone and (not first or worker.alone_s < first.alone_s) then first = worker end
  end
  if not first then return nil end
  local able, best = {}, math.huge
  local function take(worker)
    local enough = enough_to_compute(worker, best + TIE_S - worker.hold_s, group, query)
    if settled_beyond(enough, worker, group, query) and worker.alone then
      able[#able + 1] = worker
      if worker.alone_s < best then best = worker.alone_s end
    end
  end
  take(first)
  for i = 1, #decodes do
    local worker = decodes[i]
    if worker ~= first and worker.alone and worker.alone_s <= best + TIE_S then take(worker) end
  end
  return #able > 0 and alone(cheapest(able, 'alone_s'), group) or nil
end

-- The best "alone" and the best pair of each compat hash.
local function options(groups, query)
  local found = {}
  query.any_whole = false
  for _, group in ipairs(groups) do
    query.any_whole = query.any_whole or (#group.prefills > 0 and #group.decodes > 0)
  end
  for _, group in ipairs(groups) do
    price_group(group, query)
    if query.others > 0 then
      for _, worker in ipairs(group.members) do settle(worker, group, query) end
    end
    if #group.decodes > 0 then found[#found + 1] = best_alone(group, query) end
    if #group.prefills > 0 and #group.decodes > 0 then found[#found + 1] = best_pair(group, query) end
  end
  return found
end

-- {worker, queue tokens, sequences, room tokens} for each worker of the choice.
local function claims_of(choice, query)
  local computing = choice.prefill or choice.decode
  local missing = missing_after(known_to(computing), query)
  if not choice.prefill then return {{choice.decode, missing, 1, query.room_tokens}} end
  return {{choice.prefill, missing, 0, query.prompt_tokens}, {choice.decode, 0, 1, query.room_tokens}}
end

-- Predicted seconds until the computing worker of `choice` has computed the prompt.
local function computed_in(choice, query)
  local computing = choice.prefill or choice.decode
  local fetching_s = computing.source and fetch_wait(computing, computing.fetch_s) or 0
  return computing.queue_s + fetching_s + missing_after(known_to(computing), query) * computing.token_s
end

local function reserve(state, claims, bucket)
  local now = state.now
  for _, claim in ipairs(claims) do
    local worker, queue, sequences, room = unpack(claim)
    local row = with_reservation(worker.row, now, bucket, queue, sequences, room)
    redis.call('HSET', state.fleet, worker.incarnation, row)
    add_reserved(worker, row, now, bucket, queue, sequences, room)
    rank(state, worker)
    claim[1] = worker.incarnation
  end
  return claims
end

-- route_and_reserve
-- ARGV: 1 prefix, 2 model (8-byte digest), 3 prompt tokens, 4 output tokens to reserve, 5 block size of
--       the chain, 6 local prefill tokens, 7 random seed, 8 chain (16-byte digests, concatenated) of named blocks,
--       9 number of blocks of the prompt: each 1st, 2nd, 4th, 8th … of them is named, up to the limit, and the last one,
--       10 number of other options to return, 11 number of workers that have to load the adapter, then of each
--       incarnation, seconds to load it, seconds to load again what makes way; then the number of workers that alone are
--       allowed, 0 for all, and their incarnations; then incarnations to exclude
-- Returns msgpack {status = chosen | none, chosen = {decode, prefill, degraded, matched, decode_matched, fetch, terms},
--                  passed_over, reservation, dropped}.
--   matched: prompt tokens found on the worker that computes the prompt; decode_matched: on the decode worker.
--   fetch: {source, tokens, seconds} of a prefix that it should fetch from another worker; nil if none.
--   degraded: the decode worker computes it because no prefill worker could.
--   passed_over: {the cheapest others, as `chosen`, and the number of all others}; nil if none are requested.
local function route_and_reserve(keys, args)
  local state = open_to_route(keys, args)
  math.randomseed(tonumber(args[7]))
  local query = read_query(state, args)
  query.in_flight = blocks_in_flight(query, state.now)
  local groups = candidates(state, query)
  local found = options(groups, query)
  if #found == 0 then return cmsgpack.pack({status = 'none', dropped = state.dropped}) end
  local choice = cheapest(found, 'cost')
  local reply = {
    status = 'chosen', chosen = described(choice, query),
    passed_over = query.others > 0 and passed_over(groups, choice, query, query.others) or nil,
    dropped = state.dropped,
  }
  -- From here on the load of workers includes this request.
  local bucket = state.now - state.now % RESERVATION_BUCKET_MS
  local note = note_prompt(choice.prefill or choice.decode, query, computed_in(choice, query), state.now, bucket)
  reply.reservation = {bucket = bucket, note = note, claims = reserve(state, claims_of(choice, query), bucket)}
  return cmsgpack.pack(reply)
end

-- release: remove reservations whose attempts have ended before the workers reported them. Expired ones do not change.
-- ARGV: 1 prefix, then per reservation: bucket, note, number of workers, and per worker: incarnation, queue tokens,
-- sequences, room tokens. Returns 1.
local function release(keys, args)
  local state, i = open(keys, args), 2
  while i <= #args do
    local bucket, last = tonumber(args[i]), i + 2 + 4 * tonumber(args[i + 2])
    take_back_notes(tonumber(args[i + 1]), bucket)
    for at = i + 3, last, 4 do
      local row = redis.call('HGET', state.fleet, args[at])
      if row and well_sized(row) then
        local changed = with_reservation(row, state.now, bucket,
          -tonumber(args[at + 1]), -tonumber(args[at + 2]), -tonumber(args[at + 3]))
        redis.call('HSET', state.fleet, args[at], changed)
        row_changed(state, args[at], row, changed)
      end
    end
    i = last + 1
  end
  return 1
end

register('route_and_reserve', route_and_reserve)
register('release', release)
