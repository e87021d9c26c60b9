"""python -m sgl_specflow.training COMMAND [CONFIG.yaml] [name=value ...]

    regenerate   prompts in, the target's own continuations out
    train        one head, from what regenerate wrote; goes on from OUT/checkpoint.pt; also under torchrun
    export       OUT/checkpoint.pt as a head's folder: the same config, no training
    evaluate     offline accept lengths of heads on test prompts
    ablate       heads that differ in one thing each (direction, loss, data), trained alike, and their accept lengths

The names are those of the dataclasses in sgl_specflow/training/config.py.
"""

import functools
import sys
from pathlib import Path

from sgl_specflow.errors import SpecflowConfigError
from sgl_specflow.training.config import AblateConfig, EvaluateConfig, RegenerateConfig, TrainConfig, load

LOCKSTEP_BATCH = 4096
GREEDY_BATCH = 64
HELD_OUT = 48  # train prompts of a data set that no ablation trains on


def _config(kind, words: list[str]):
    path = words[0] if words and "=" not in words[0] else None
    return load(kind, path, words[1:] if path else words)


def regenerate(words: list[str]) -> None:
    from sgl_specflow.training.regenerate import EngineGenerator
    from sgl_specflow.training.regenerate import regenerate as run
    from sgl_specflow.training.target_states import load_tokenizer

    config = _config(RegenerateConfig, words)
    tokenizer = load_tokenizer(config.target)
    if config.backend == "engine":
        generate = EngineGenerator(config.target, config.engine_flags)
        try:
            run(config, generate, tokenizer)
        finally:
            generate.close()
    else:
        from transformers import LlamaForCausalLM

        from sgl_specflow.training.lockstep import LockstepGenerator

        model = _model(config.target, "auto")
        if not isinstance(model, LlamaForCausalLM):
            raise SpecflowConfigError(
                given=f"backend lockstep with {config.target}, a {type(model).__name__}",
                allowed="lockstep decoding of LlamaForCausalLM alone",
                todo="give backend=engine",
            )
        run(config, LockstepGenerator(model, LOCKSTEP_BATCH, config.seed), tokenizer)


def train(words: list[str]) -> None:
    from sgl_specflow.training.export import export as write
    from sgl_specflow.training.export import facts

    trainer, responses = _trainer(_config(TrainConfig, words))
    config, checkpoint = trainer.config, Path(trainer.config.out) / "checkpoint.pt"
    if checkpoint.exists():
        trainer.load(checkpoint)
        print(f"going on from step {trainer.progress.step}", flush=True)
    trainer.warm_up()
    trainer.run()
    trainer.save(checkpoint)
    trainer.validate()
    if trainer.process == 0:
        run = facts(config, trainer.head_config, trainer, responses, _data_kind(responses))
        write(Path(config.out) / "head", trainer.head_config, trainer.exported, run)


def export(words: list[str]) -> None:
    from sgl_specflow.training.export import export as write
    from sgl_specflow.training.export import facts

    trainer, responses = _trainer(_config(TrainConfig, words))
    trainer.load(Path(trainer.config.out) / "checkpoint.pt")
    run = facts(trainer.config, trainer.head_config, trainer, responses, _data_kind(responses))
    write(Path(trainer.config.out) / "head", trainer.head_config, trainer.exported, run)


def evaluate(words: list[str]) -> None:
    from sgl_specflow.drafter.config import HeadConfig
    from sgl_specflow.training.evaluate import continuations, table
    from sgl_specflow.training.evaluate import evaluate as measure
    from sgl_specflow.training.target_states import FrozenTarget, load_tokenizer

    config = _config(EvaluateConfig, words)
    for head in config.heads:
        HeadConfig.load(head)  # before anything is computed
    model = _model(config.target, config.dtype)
    answers = continuations(config, load_tokenizer(config.target), greedy(model))
    print(table(measure(config, FrozenTarget(model, ()), answers)))


def ablate(words: list[str]) -> None:
    import transformers

    from sgl_specflow.training.ablations import ablate as run
    from sgl_specflow.training.evaluate import continuations, table
    from sgl_specflow.training.regenerate import corpus_responses
    from sgl_specflow.training.responses import load_responses
    from sgl_specflow.training.target_states import FrozenTarget

    config = _config(AblateConfig, words)
    responses = load_responses(config.responses)
    model = _model(config.target, config.dtype)
    tokenizer = transformers.AutoTokenizer.from_pretrained(config.target)
    answers = continuations(config, tokenizer, greedy(model))
    corpus = functools.cache(lambda: corpus_responses(config.data, tokenizer, HELD_OUT))
    print(table(run(config, FrozenTarget(model, ()), model.config, responses, corpus, answers)))


def _trainer(config: TrainConfig):
    from sgl_specflow.training.responses import load_responses
    from sgl_specflow.training.target_states import FrozenTarget, load_model
    from sgl_specflow.training.trainer import Trainer, start_processes

    responses = load_responses(config.responses)
    model = load_model(config.target, start_processes(), config.dtype)
    head = config.head.config(model.config)
    return Trainer(config, head, FrozenTarget(model, head.target_layer_ids), responses), responses


def _model(target: str, dtype: str):
    import torch

    from sgl_specflow.training.target_states import load_model

    return load_model(target, "cuda" if torch.cuda.is_available() else "cpu", dtype)


def greedy(model):
    """What decodes the model's own answers: this package's lockstep for Llama, transformers for others."""
    from transformers import LlamaForCausalLM

    from sgl_specflow.training.lockstep import GreedyGenerator, LockstepGenerator

    if isinstance(model, LlamaForCausalLM):
        return LockstepGenerator(model, LOCKSTEP_BATCH)
    return GreedyGenerator(model, GREEDY_BATCH)


def _data_kind(responses) -> str:
    return "corpus" if not any(response.greedy for response in responses) else "regenerated"


COMMANDS = {"regenerate": regenerate, "train": train, "export": export, "evaluate": evaluate, "ablate": ablate}


def main() -> int:
    if len(sys.argv) < 2 or sys.argv[1] not in COMMANDS:
        print(__doc__, file=sys.stderr)
        return 2
    try:
        COMMANDS[sys.argv[1]](sys.argv[2:])
    except SpecflowConfigError as error:
        print(error, file=sys.stderr)
        return 1
    except FileNotFoundError as error:
        print(f"sgl_specflow: given {error.filename}, which is not there. To do: give its path.", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
