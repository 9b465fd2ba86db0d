"""`tandem chat`: a conversation in the terminal, streamed from any OpenAI-compatible server."""

import argparse
import sys
from typing import Any

from tandem_engine.config.flags import positive_int
from tandem_services.cli.flags import add_api_key, key_headers, non_negative_float
from tandem_services.common.errors import RemoteError

EXAMPLES = """\
examples:
  tandem chat
  tandem chat --url http://10.0.0.5:8000 --system "Answer in one sentence."
  echo "Hello!" | tandem chat              one turn for each line of standard input

in the conversation: Ctrl-C stops an answer, /help lists the commands, /quit or Ctrl-D ends.
On a terminal, Markdown is rendered and reasoning is dim; in a pipe the answer is plain text without reasoning.
"""


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "chat",
        help="chat with a running server in the terminal",
        description="Chat with a served model; after each response print tokens, cached tokens, speed and workers.",
        epilog=EXAMPLES,
    )
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="server (default: http://127.0.0.1:8000)")
    add_conversation(parser)
    parser.set_defaults(run=run)


def add_conversation(parser: argparse.ArgumentParser) -> None:
    """What a conversation is like, wherever it is held; see `converse`."""
    parser.add_argument("--model", metavar="NAME", help="model name (default: the first one served)")
    add_api_key(parser)
    parser.add_argument("--system", metavar="TEXT", help="system message")
    parser.add_argument("--temperature", type=non_negative_float, default=0.0, help="0 is greedy (default: 0)")
    parser.add_argument(
        "--max-tokens", type=positive_int, metavar="N", help="maximum output tokens (default: what the context leaves)"
    )
    parser.add_argument("--seed", type=int, help="makes sampling repeatable")


def run(args: argparse.Namespace) -> int:
    import httpx

    headers = key_headers(args)
    with httpx.Client(base_url=args.url, headers=headers, timeout=httpx.Timeout(60.0, connect=5.0)) as client:
        try:
            return converse(client, args)
        except httpx.HTTPError as error:
            raise RemoteError(f"{args.url} does not answer ({error}): is `tandem up` running?") from error


def converse(client: Any, args: argparse.Namespace) -> int:
    """Hold a conversation over `client`; returns the exit status.

    Raises `RemoteError` and `httpx.HTTPError` while it connects.
    """
    from tandem_services.cli.chat.conversation import Conversation
    from tandem_services.cli.chat.display import display_for
    from tandem_services.cli.chat.loop import Loop

    options: dict[str, Any] = {"temperature": args.temperature}
    options |= {"max_tokens": args.max_tokens} if args.max_tokens is not None else {}
    options |= {"seed": args.seed} if args.seed is not None else {}
    conversation = Conversation(client=client, model=args.model or "", options=options, system=args.system)
    served = conversation.served_models()
    conversation.model = conversation.model or next(iter(served), "")
    return Loop(conversation, display_for(sys.stdout), interactive=sys.stdin.isatty()).run()
