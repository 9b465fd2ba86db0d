-- Which worker would better fetch a prefix than compute it, and from whom. router/fetching.py is the same in Python, with
-- the reasons; a property test holds the two together.

-- Longer text than MAX_LINKS figures of the longest names is not ours.
local LINKS_BYTES = 65536

-- Seconds per token by receiver. A figure that makes no sense is left out.
local function read_links(text)
  local links = {}
  if #text > LINKS_BYTES then return links end
  for receiver, told in string.gmatch(text, '(%S+) (%S+)') do
    local figure = tonumber(told)
    if figure and figure >= 0 and figure <= BROKEN_TOKEN_S then links[receiver] = figure end
  end
  return links
end

-- What `from` measured before its last heartbeat. To whom it has no figure costs what its links cost typically.
local function links_of(from)
  if not from.read_links then
    local text = redis.pcall('GET', from.links)
    from.read_links = type(text) == 'string' and read_links(text) or {}
  end
  return from.read_links
end

-- Have each of `workers` fetch from `source` if that is cheaper than what it would do so far.
local function consider(workers, source, query)
  local links, typical = links_of(source), source.transfer_token_s
  local asked_s, tokens = FETCH_S + FETCH_TURNS * source.turn_s, source.matched
  local missing = missing_after(tokens, query)
  for i = 1, #workers do
    local worker = workers[i]
    local moved = tokens - worker.matched
    if moved > 0 and worker.computes then
      local known_s = missing * worker.work_s + moved * worker.copy_s
      if known_s < worker.known_s then
        local seconds = asked_s + moved * (links[worker.incarnation] or typical)
        if seconds > worker.queue_s then known_s = known_s + seconds - worker.queue_s end
        if known_s < worker.known_s then
          local compute_s = worker.queue_s + known_s
          worker.known, worker.fetch_s, worker.source, worker.known_s = tokens, seconds, source, known_s
          worker.compute_s, worker.alone_s = compute_s, compute_s + worker.hold_s
        end
      end
    end
  end
end

-- Fetches for those of `workers` that may compute, and their prices anew. The longest matches are looked at.
local function consider_fetches(workers, query)
  local having = {}
  for i = 1, #workers do
    local worker = workers[i]
    if worker.matched > 0 then
      worker.lacking = -worker.matched
      having[#having + 1] = worker
    end
  end
  for _, source in ipairs(shortlist(having, 'lacking', PAIR_ENDS)) do consider(workers, source, query) end
end
