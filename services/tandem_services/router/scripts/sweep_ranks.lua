-- Ranks of workers whose release writes none, and ranks that Redis has lost.

-- Releases without ranks register no more workers than this. The sweep looks at no further rows after so many.
local MAX_UNPUBLISHED = 4096

-- Ranks the live worker of `row` if its release does not, or if `always`. Returns 1 if its release writes no holders,
-- else 0.
local function rank_row(state, incarnation, row, always)
  local worker = decoded(state, incarnation, row)
  if not worker.live then return 0 end
  local published = publishes(state, worker)
  if always or not published then
    rank(state, worker)
    local keys = rank_keys(state.prefix, worker.model .. worker.compat)
    if not state[keys] then -- once in this call
      state[keys] = true
      keep_ranks(state, worker)
    end
  end
  return published and 0 or 1
end

-- All rows were looked at, and so many workers publish no holders.
local function note_ranked(state, unpublished)
  set_meta_time(state, 'ranked_at', state.now)
  set_meta_time(state, 'unpublished', unpublished)
end

-- Writes the ranks of all workers of `model`. Rows of others are not decoded: a model without workers may be requested
-- for a long time, beside any number of them.
local function rank_model(state, model)
  local rows, unpublished = redis.call('HGETALL', state.fleet), 0
  for i = 1, #rows, 2 do
    local row = rows[i + 1]
    if unpublished < MAX_UNPUBLISHED and model_of(row) == model and worker_of(rows[i])
        and lease_state(row, state.now) == 'live' then
      unpublished = unpublished + rank_row(state, rows[i], row, true)
    end
  end
  local known = whole(meta_field(state, 'unpublished'), MAX_WHOLE) or 0
  set_meta_time(state, 'unpublished', math.max(known, unpublished))
end
