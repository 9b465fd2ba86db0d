-- The ways to serve a request: a decode worker alone, or a pair. Dozens are priced; tables are made only of the chosen
-- option and, for explain, of the cheapest others.

local function alone(decode, group)
  return {cost = decode.alone_s, decode = decode, degraded = #group.prefills == 0 and decode.role == ROLE_DECODE}
end

-- The i-th pair of `ends`, in the order of prefill workers, with its cost and seconds per token.
local function pair_at(ends, i)
  local count = #ends.decodes
  return {
    cost = ends.costs[i], token_s = ends.token_s[i],
    prefill = ends.prefills[math.floor((i - 1) / count) + 1], decode = ends.decodes[(i - 1) % count + 1],
  }
end

-- An option as it is returned: its workers, their cached tokens, its price.
local function described(option, query)
  local decode = option.decode
  local computing = option.prefill or decode
  local source = computing.source
  return {
    decode = decode.incarnation, prefill = option.prefill and option.prefill.incarnation,
    degraded = option.degraded or false, matched = computing.matched, decode_matched = decode.matched,
    -- Determined only if other options are returned too.
    in_host = query.others > 0 and computing.in_host or 0, decode_in_host = query.others > 0 and decode.in_host or 0,
    fetch = source and {source.incarnation, source.held, computing.fetch_s} or nil,
    terms = terms_of(option, query),
  }
end

-- Adds to `found` all priced options of `group` except the choice.
local function add_others(found, group, choice)
  for _, decode in ipairs(group.decodes) do
    if decode.alone and (choice.prefill or choice.decode ~= decode) then found[#found + 1] = alone(decode, group) end
  end
  if not group.ends then return end
  for i, cost in ipairs(group.ends.costs) do
    local pair = pair_at(group.ends, i)
    if cost < math.huge and (pair.prefill ~= choice.prefill or pair.decode ~= choice.decode) then
      found[#found + 1] = pair
    end
  end
end

-- The `limit` cheapest options that were not chosen, in no order, and the number of all others.
local function passed_over(groups, choice, query, limit)
  local found, explained = {}, {}
  for _, group in ipairs(groups) do add_others(found, group, choice) end
  for i, option in ipairs(shortlist(found, 'cost', limit)) do explained[i] = described(option, query) end
  return {explained, #found - #explained}
end
