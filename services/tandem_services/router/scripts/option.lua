-- The ways to serve a request: a decode worker alone, or a pair. Priced by the dozen, made into tables when somebody
-- wants to see them: the one that is chosen, and for explain those that it was chosen from.

local function alone(decode, group)
  return {cost = decode.alone_s, decode = decode, degraded = #group.prefills == 0 and decode.role == ROLE_DECODE}
end

-- The i-th of the pairs of `ends`: its costs and seconds per token, prefill worker by prefill worker.
local function pair_at(ends, i)
  local count = #ends.decodes
  return {
    cost = ends.costs[i], token_s = ends.token_s[i],
    prefill = ends.prefills[math.floor((i - 1) / count) + 1], decode = ends.decodes[(i - 1) % count + 1],
  }
end

-- An option as it is told: its workers, what they have cached, its price.
local function described(option, query)
  local decode = option.decode
  local computing = option.prefill or decode
  local source = computing.source
  return {
    decode = decode.incarnation, prefill = option.prefill and option.prefill.incarnation,
    degraded = option.degraded or false, matched = computing.matched, decode_matched = decode.matched,
    -- Found out for all that are told.
    in_host = query.others > 0 and computing.in_host or 0, decode_in_host = query.others > 0 and decode.in_host or 0,
    fetch = source and {source.incarnation, source.held, computing.fetch_s} or nil,
    terms = terms_of(option, query),
  }
end

-- Everything that was priced in `group`, but for the choice, added to `found`.
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

-- The cheapest `most` of what was not chosen, in no order, and how many more there were.
local function passed_over(groups, choice, query, most)
  local found, told = {}, {}
  for _, group in ipairs(groups) do add_others(found, group, choice) end
  for i, option in ipairs(shortlist(found, 'cost', most)) do told[i] = described(option, query) end
  return {told, #found - #told}
end
