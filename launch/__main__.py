"""python -m sgl_specflow.launch COMMAND: batch jobs and the quickstart. For a server, run SGLang's own launcher."""

import argparse
import sys

from sgl_specflow.launch import batch, quickstart

_EPILOG = """\
To serve, start SGLang as usual; installing sgl_specflow adds the algorithm:
  python -m sglang.launch_server --model-path Qwen/Qwen3-8B \\
      --speculative-algorithm jetflow --speculative-draft-model-path JetSpec/jetspec-qwen3-8b
"""


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m sgl_specflow.launch",
        description="Batch jobs and the quickstart of sgl_specflow.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, module, summary in (
        ("batch", batch, "answer a file of prompts; can be interrupted and continued"),
        ("quickstart", quickstart, "plain and tree decoding of the same prompts, side by side"),
    ):
        command = commands.add_parser(
            name, help=summary, description=module.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        module.add_arguments(command)
        command.set_defaults(main=module.main)

    own, server_flags = arguments, []
    if "--" in arguments:
        split = arguments.index("--")
        own, server_flags = arguments[:split], arguments[split + 1 :]
    options = parser.parse_args(own)
    if server_flags and getattr(options, "url", None):
        parser.error("flags after -- go to an engine; a server at --url has its own")
    return options.main(options, server_flags)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
