"""Forms of the Gated Delta Net kernel timed side by side in less than a minute of a machine with a GPU.

    python .ci/gpu/probe_gdn.py build NAME FOLDER [NODES ...]    # here: compiles a copy of kernels/gdn_tree for sm_90a
    pip install --no-deps --no-build-isolation --target /tmp/site .
    PYTHONPATH=/tmp/site timeout 40 python3 .ci/gpu/probe_gdn.py time [REQUESTSxNODES ...]    # there; carried: .gpu/probe

NAME is the form's in the table. The copies' arguments, grid and entries must be those of the installed package. Each form is
timed twice, in turn: the machine's clock drifts by 2 %. Forms that differ by a few instructions may differ by 6 % in time
(docs/performance.md, Gated Delta Net).
"""

import importlib.util
import json
import sys
from pathlib import Path

CUBINS = Path(".gpu/probe")
SHAPES = ("1x64", "1x128", "1x256", "4x64", "4x128")


def build(name: str, folder: Path, nodes: list[int]) -> None:
    from sgl_specflow.kernels.nvrtc import compile_cubin

    spec = importlib.util.spec_from_file_location(f"probe_{name}", folder / "cuda_kernel.py")
    form = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = form
    spec.loader.exec_module(form)
    CUBINS.mkdir(parents=True, exist_ok=True)
    headers = {path.name: path.read_text() for path in folder.glob("*.cuh")}
    for count in nodes:
        shape = form.select_shape(count, 128, 128, False, 232448)
        cubin = compile_cubin("gdn_tree", (folder / "gdn_tree.cu").read_text(), headers, shape.defines(), "sm_90a")
        (CUBINS / f"{name}-{shape.tiles * 16}.cubin").write_bytes(cubin)
        about = {"threads": shape.warps * 32, "shared_bytes": shape.shared_bytes}
        (CUBINS / f"{name}-{shape.tiles * 16}.json").write_text(json.dumps(about))


def time(shapes: list[tuple[int, int]]) -> None:
    import torch
    from sgl_specflow.eval.gdn import Heads, random_parents, verifies
    from sgl_specflow.eval.timing import microseconds
    from sgl_specflow.kernels.gdn_tree import cuda_kernel
    from sgl_specflow.kernels.nvrtc import LoadedKernels

    forms, used, calls = {}, {}, {}
    for path in sorted(CUBINS.glob("*.cubin")):
        name, _, nodes = path.stem.rpartition("-")
        about = json.loads(path.with_suffix(".json").read_text())
        forms.setdefault(name, {})[int(nodes)] = LoadedKernels(path.read_bytes()), about

    def launch(shape, name, grid, shared_bytes, arguments, device):
        kernels, about = used[shape.tiles * 16]
        stream = torch.cuda.current_stream().cuda_stream
        kernels.launch(name, grid, about["threads"], about["shared_bytes"], stream, arguments)

    cuda_kernel._launch = launch
    print(f"{'':16}", *(f"{requests}x{nodes}".rjust(8) for requests, nodes in shapes))
    for name, kernels in [*forms.items()] * 2:
        used.clear()
        used.update(kernels)
        row = []
        for requests, nodes in shapes:
            if -(-nodes // 16) * 16 not in used:
                row.append("-".rjust(8))
                continue
            if (requests, nodes) not in calls:
                parents = random_parents(requests, nodes, seed=requests * 1000 + nodes)
                calls[requests, nodes] = verifies(Heads(16, 48, 128), parents, torch.float32)
            row.append(f"{microseconds(calls[requests, nodes], replays=15):8.2f}")
        print(f"{name:16}", *row, flush=True)


if __name__ == "__main__":
    command, *rest = sys.argv[1:]
    if command == "build":
        build(rest[0], Path(rest[1]), [int(count) for count in rest[2:]] or [64, 128, 256])
    else:
        time([tuple(map(int, shape.split("x"))) for shape in rest or SHAPES])
