-- Workers as a routing decision sees them: decoded rows of the fleet, with what each costs by itself.
--
-- Most rows are the same in the next decision, and to compare one takes a small part of what decoding it does. So
-- decoded workers are kept, by key prefix and incarnation, and decoded again when the row or the time has changed: what is
-- kept is never older than Redis, whatever happens to Redis, and the library forgets it when it is loaded again.

local BEAT_BYTES = 16 -- of a row: the end of its lease and the time of its report, new with each heartbeat

-- Tokens queued, sequences and room taken by the reservations of `row` that count at `now`, and since and until when
-- exactly these do.
local function reserved_load(row, now, report_ms)
  local queue_tokens, sequences, room_tokens, from, till = 0, 0, 0, -math.huge, math.huge
  for first = ROW_BYTES + 1, #row, RESERVATION_BYTES do
    local bucket, queue, added, room = struct.unpack(RESERVATION, row, first)
    local lapses = bucket + RESERVATION_BUCKET_MS + RESERVATION_MS
    if counts(bucket, now, report_ms) then
      queue_tokens, sequences, room_tokens = queue_tokens + queue, sequences + added, room_tokens + room
      from, till = math.max(from, bucket), math.min(till, lapses)
    elseif bucket > now then
      till = math.min(till, bucket)
    else
      from = math.max(from, lapses)
    end
  end
  return queue_tokens, sequences, room_tokens, from, till
end

-- A worker that is live and offered, by its row at `now`; else nil. `from` and `till` bound the time for which it holds.
-- The comparisons with math.huge and 0 also refuse NaN.
local function decode_row(prefix, incarnation, row, now)
  if not well_sized(row) then return nil end
  local lease_ms, report_ms, role, offered, page_size, context_length, model, compat,
    queue_tokens, token_s, sequences, step_s, room_tokens, max_sequences, transfer_token_s = struct.unpack(ROW, row)
  if offered ~= 1 or not (lease_ms >= now and lease_ms <= now + LEASE_MS) then return nil end
  if not (queue_tokens >= 0 and token_s >= 0 and sequences >= 0 and step_s >= 0 and transfer_token_s >= 0
      and queue_tokens + token_s + sequences + step_s + transfer_token_s < math.huge) then return nil end
  local queued, added, taken, from, till = reserved_load(row, now, report_ms)
  queue_tokens, sequences, room_tokens = queue_tokens + queued, sequences + added, room_tokens - taken
  local waiting = waiting_sequences(role, sequences)
  -- The lines after the first four are filled in for each query; named here, so that the table is allocated once.
  local beat = string.sub(row, 1, BEAT_BYTES)
  return {
    incarnation = incarnation, row = row, beat = beat, from = math.max(from, lease_ms - LEASE_MS), till = math.min(till, lease_ms + 1),
    blocks = prefix .. 'blocks:' .. incarnation, links = prefix .. 'links:' .. incarnation, role = role,
    page_size = page_size, context_length = context_length, model = model, compat = compat, room_tokens = room_tokens,
    full = sequences >= max_sequences, token_s = token_s, transfer_token_s = transfer_token_s,
    queue_s = queue_tokens * token_s, turn_s = turn(queue_tokens, token_s, sequences, step_s), waiting = waiting,
    work_s = token_s * (1 + waiting), copy_s = token_s * COPY_FOLLOWERS, load_s = sequences * step_s,
    low = 0, high = 0, matched = 0, missing = 0, known = 0, fetch_s = 0, source = false, alone = false,
    known_s = 0, compute_s = 0, hold_s = 0, alone_s = 0, read_links = false,
  }
end

local MAX_FLEETS = 8
local fleets, fleet_count = {}, 0
local NOBODY = {row = false}

local function decoded_fleet(prefix, rows)
  local fleet = fleets[prefix]
  if not fleet then
    if fleet_count == MAX_FLEETS then fleets, fleet_count = {}, 0 end
    fleet, fleet_count = {workers = {}, count = 0}, fleet_count + 1
    fleets[prefix] = fleet
  end
  -- Mostly of incarnations that have gone.
  if fleet.count > #rows + 64 then fleet.workers, fleet.count = {}, 0 end
  return fleet
end

-- decode_row, by what is known of the fleet.
local function worker_of_row(fleet, prefix, incarnation, row, now)
  local worker = fleet.workers[incarnation]
  if worker and worker.row == row and now >= worker.from and now < worker.till then return worker end
  if not worker then fleet.count = fleet.count + 1 end
  local decoded = decode_row(prefix, incarnation, row, now)
  -- Links are written with the row, by heartbeats only.
  if decoded and worker and worker.beat == decoded.beat then decoded.read_links = worker.read_links end
  fleet.workers[incarnation] = decoded or NOBODY
  return decoded
end

-- Iterates over the live and offered workers of `state`.
local function live_workers(state)
  local rows = redis.call('HGETALL', state.fleet)
  local prefix, now, i = state.prefix, state.now, -1
  local fleet = decoded_fleet(prefix, rows)
  return function()
    while true do
      i = i + 2
      local incarnation = rows[i]
      if not incarnation then return nil end
      local worker = worker_of_row(fleet, prefix, incarnation, rows[i + 1], now)
      if worker then return worker end
    end
  end
end
