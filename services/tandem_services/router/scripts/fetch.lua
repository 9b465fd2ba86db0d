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

-- Have `worker` fetch from `source`, which has more of the prompt, if that is cheaper than what it would do so far.
local function consider(worker, source, query)
  local tokens = source.matched
  local moved = tokens - worker.matched
  local known_s = missing_after(tokens, query) * worker.work_s + moved * worker.copy_s
  if known_s >= worker.known_s then return end
  local token_s = links_of(source)[worker.incarnation] or source.transfer_token_s
  local seconds = FETCH_S + FETCH_TURNS * source.turn_s + moved * token_s
  if seconds > worker.queue_s then known_s = known_s + seconds - worker.queue_s end
  if known_s < worker.known_s then
    local compute_s = worker.queue_s + worker.back_s + known_s
    worker.known, worker.fetch_s, worker.source, worker.known_s = tokens, seconds, source, known_s
    worker.compute_s, worker.alone_s = compute_s, compute_s + worker.hold_s
  end
end

-- The PAIR_ENDS of `workers` that have most of the chain, exactly, the longest match first. Of all others it is known
-- that they have no more than the last of them, which takes a single look for most: one just beyond that.
local function longest_matches(workers, query)
  local look, search, block_size, named = query.look, query.search, query.block_size, query.named
  local count, found, least = #workers, {}, 0
  local at = math.random(count)
  for _ = 1, count do
    at = at % count + 1
    local worker = workers[at]
    -- Pages of another size than the chain's cannot match.
    worker.low, worker.high = 0, worker.page_size == block_size and named or 0
    worker.settled, worker.in_host, worker.back_s = false, 0, 0
    if worker.high > least then
      look(worker, least + 1)
      if worker.low > least then
        search(worker, least)
        local place = #found
        if place == PAIR_ENDS then place = place - 1 end
        while place > 0 and worker.low > found[place].low do
          found[place + 1] = found[place]
          place = place - 1
        end
        found[place + 1] = worker
        if #found == PAIR_ENDS then least = found[PAIR_ENDS].low end
      end
    end
  end
  return found
end
