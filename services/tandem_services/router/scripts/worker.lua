-- A worker in a routing decision: its decoded row, and the parts of its cost that follow from it. fleet.lua keeps them.

local BEAT_BYTES = 16 -- start of a row: the end of its lease and the time of its report, new with each heartbeat

-- Queue tokens, sequences and room tokens of the reservations of `row` that are valid at `now`, and the time span in
-- which exactly these are valid.
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

-- A worker of which only the name is known.
local function unread_worker(prefix, incarnation)
  -- All fields are named, so that the table is allocated once. Each decision sets the last two lines.
  return {
    incarnation = incarnation, described = prefix .. 'worker:' .. (worker_of(incarnation) or ''),
    blocks = prefix .. 'blocks:' .. incarnation, host_blocks = prefix .. 'host:' .. incarnation,
    links = prefix .. 'links:' .. incarnation, read_links = false, read_host_token_s = false,
    row = false, beat = false, from = math.huge, till = -math.huge, live = false, publishes = false, tag = false,
    report_ms = 0, role = 0, page_size = 0, context_length = 0, model = '', compat = '',
    queue_tokens = 0, sequences = 0, step_s = 0, room_tokens = 0, max_sequences = 0, full = false,
    token_s = 0, transfer_token_s = 0, queue_s = 0, turn_s = 0, waiting = 0, work_s = 0, copy_s = 0, load_s = 0,
    low = 0, high = 0, settled = false, in_host = 0, back_s = 0, matched = 0, held = 0, missing = 0,
    absent = false, source = false, fetch_s = 0, alone = false, compute_s = 0, hold_s = 0, alone_s = 0,
  }
end

-- The values of `worker` that follow from its load: that of its report plus valid reservations.
local function weigh_load(worker)
  local queue_tokens, token_s, sequences, step_s = worker.queue_tokens, worker.token_s, worker.sequences, worker.step_s
  local waiting = waiting_sequences(worker.role, sequences)
  worker.queue_s, worker.turn_s = queue_tokens * token_s, turn(queue_tokens, token_s, sequences, step_s)
  worker.waiting, worker.work_s, worker.load_s = waiting, token_s * (1 + waiting), sequences * step_s
  worker.full = sequences >= worker.max_sequences
end

-- Decodes `row` into `worker` at `now`: whether it is live and offered, and for how long that holds. The comparisons with
-- math.huge and 0 also reject NaN.
local function read_row(worker, row, now)
  worker.row, worker.live, worker.till = row, false, -math.huge
  if not well_sized(row) then return end
  local lease_ms, report_ms, role, offered, page_size, context_length, model, compat,
    queue_tokens, token_s, sequences, step_s, room_tokens, max_sequences, transfer_token_s = struct.unpack(ROW, row)
  if offered ~= 1 or not (lease_ms >= now and lease_ms <= now + LEASE_MS) then return end
  if not (queue_tokens >= 0 and token_s >= 0 and sequences >= 0 and step_s >= 0 and transfer_token_s >= 0
      and queue_tokens + token_s + sequences + step_s + transfer_token_s < math.huge) then return end
  local queued, added, taken, from, till = reserved_load(row, now, report_ms)
  local beat = string.sub(row, 1, BEAT_BYTES)
  -- Links and readable fields of a worker are written with the row, by heartbeats only.
  if worker.beat ~= beat then
    worker.beat, worker.read_links, worker.read_host_token_s = beat, false, false
  end
  worker.live, worker.from, worker.till = true, math.max(from, lease_ms - LEASE_MS), math.min(till, lease_ms + 1)
  worker.report_ms, worker.role, worker.page_size, worker.context_length = report_ms, role, page_size, context_length
  worker.model, worker.compat, worker.room_tokens, worker.max_sequences = model, compat, room_tokens - taken, max_sequences
  worker.token_s, worker.copy_s, worker.transfer_token_s = token_s, token_s * COPY_FOLLOWERS, transfer_token_s
  worker.queue_tokens, worker.sequences, worker.step_s = queue_tokens + queued, sequences + added, step_s
  weigh_load(worker)
end

-- Adds a reservation of `bucket` to the decoded `worker`; `row` includes it. Equals decoding `row`, but computes only what
-- has changed.
local function add_reserved(worker, row, now, bucket, queue, sequences, room)
  if not counts(bucket, now, worker.report_ms) then return read_row(worker, row, now) end
  worker.row, worker.from = row, math.max(worker.from, bucket)
  worker.till = math.min(worker.till, bucket + RESERVATION_BUCKET_MS + RESERVATION_MS)
  worker.queue_tokens, worker.sequences = worker.queue_tokens + queue, worker.sequences + sequences
  worker.room_tokens = worker.room_tokens - room
  weigh_load(worker)
end

-- Seconds to copy the KV of one token from host memory to the device; 0 if not measured.
local function host_token_s(worker)
  if not worker.read_host_token_s then
    local text = redis.pcall('HGET', worker.described, 'host_token_s')
    local token_s = type(text) == 'string' and tonumber(text) or 0
    worker.read_host_token_s = token_s > 0 and token_s <= BROKEN_TOKEN_S and token_s or 0
  end
  return worker.read_host_token_s
end
