"""The errors of the API's port by status: the same shape for all, and who may meet which."""

from collections.abc import Mapping

ERRORS: Mapping[int, tuple[str, str]] = {
    400: ("BadRequest", "What can never succeed. `param` names the field at fault."),
    401: ("Unauthorized", "No API key, or an unknown one."),
    403: ("Forbidden", "This key may not use administrators' routes."),
    404: ("NotFound", "No such model, session or request."),
    408: ("RequestTimeout", "Headers or body did not arrive in time."),
    409: ("Conflict", "The session is open already, is not kept, or cannot take this turn."),
    413: ("RequestEntityTooLarge", "The body is too large."),
    414: ("UriTooLong", "The URL is too long."),
    415: ("UnsupportedMediaType", "The body must be application/json, as it is."),
    429: ("TooManyRequests", "A limit of the API key, or its requests fill the queue."),
    431: ("RequestHeaderFieldsTooLarge", "Headers are too many or too large."),
    500: ("InternalServerError", "Gateway or workers failed while answering."),
    503: ("ServiceUnavailable", "No worker or connection is free. The same request may succeed later."),
    504: ("GatewayTimeout", "The request's deadline has passed."),
    505: ("HttpVersionNotSupported", "Only HTTP/1.0 and HTTP/1.1 are spoken here."),
}
"""Name of the component and description, by status."""

ALWAYS = (400, 408, 414, 431, 500, 503, 505)
"""What any request may meet."""
WITH_A_BODY = (413, 415)
WAITS = (429, 503)
"""Statuses that may say when to try again."""
