-- What gateways of other cells know of this one: how many workers serve a model, and what one more request would cost
-- them at least. Read from the ranks, so it costs the same in any fleet and may be as wrong as they are.

local LOOKED_AT = 4 -- names of a rank: those of a fleet that died at once are all dead
local MAX_KINDS = 16 -- compat hashes of the model that are counted, as decisions look at them: the ones described last

-- Number of workers of a rank and the lowest seconds of a live one; 0 where none of the first is live.
local function rank_summary(state, key)
  local names = ranked(state, 'ZRANGE', key, 0, LOOKED_AT - 1, 'WITHSCORES')
  for i = 1, #names, 2 do
    local row = redis.call('HGET', state.fleet, names[i])
    if row and lease_state(row, state.now) == 'live' then
      return ranked(state, 'ZCARD', key), tonumber(names[i + 1])
    end
  end
  return 0, 0
end

-- Adds a rank to `found`: workers in all kinds, seconds of the cheapest.
local function add_rank(state, key, found)
  local workers, seconds = rank_summary(state, key)
  if workers == 0 then return end
  found.seconds = found.workers == 0 and seconds or math.min(found.seconds, seconds)
  found.workers = math.min(found.workers + workers, MAX_WORKERS)
end

-- cell_summary: workers of a model by role.
-- ARGV: 1 key prefix, 2 digest of the model
-- Returns msgpack {prefill = {workers, seconds}, decode = {workers, seconds}}; a worker with both roles is in both.
local function cell_summary(keys, args)
  local state = open_to_route(keys, args)
  local prefill, decode = {workers = 0, seconds = 0}, {workers = 0, seconds = 0}
  for _, compat in ipairs(ranked(state, 'ZRANGE', kinds_key(state.prefix, args[2]), -MAX_KINDS, -1)) do
    if #compat == 16 then
      local rank = rank_keys(state.prefix, args[2] .. compat)
      add_rank(state, rank.prefill, prefill)
      add_rank(state, rank.decode, decode)
    end
  end
  return cmsgpack.pack({prefill = prefill, decode = decode})
end

register('cell_summary', cell_summary)
