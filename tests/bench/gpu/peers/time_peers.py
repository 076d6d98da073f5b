"""Times other libraries' MLA decode on this machine's GPU, for gpu_bench --peers.

    time_peers.py --out FILE [--flash-mla libflash_mla_c.so]
                  [--flash-attention libflash_attention_c.so] [--flash-infer libflash_infer_c.so]
                  [--modes dense,sparse,window,prefill] [--heads 16,128] [--batch 1,16,64,128]
                  [--context 1024,4096,16384,65536] [--iterations 30] [--max-gb 20]

build_peers.sh makes the libraries. Needs PyTorch for memory, data and events. As in gpu_bench, a
time is the median GPU time of one call by events, the L2 overwritten and the device kept busy
before each call; plans are made before and excluded, except where a peer's name says otherwise.
Each result is held against fp32 on some requests first; a peer that is wrong gets no row.

FILE gets a row {"peer", "shape", "us", "least_us", "error"} a line, after those that it has. Shapes
are those of gpu_bench, "h=H b=B ctx=C" and "decode h=H b=B topk=K", and "window h=128 b=B R+E" and
"prefill h=128 rows=R kv=N topk=K" for gpu_sparse and for gpu_bench with query rows.
"""

import argparse
import collections.abc
import ctypes
import json
import pathlib
import statistics

import torch

ROW, VALUES, PAGE = 576, 512, 64
V4_ROW, V4_CODES = 512, 448
SCALE = 192 ** -0.5
LIMIT = 0.01  # largest relative error in the Frobenius norm; bf16 results have 0.002
DEVICE = "cuda"

Call = collections.abc.Callable[[], object]


def at(tensor: torch.Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(tensor.data_ptr())


def stream() -> ctypes.c_void_p:
    return ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)


def ok(status: int) -> None:
    if status != 0:
        raise RuntimeError(f"CUDA error {status}")


def relative(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.float() - want.float()).norm() / want.float().norm())


class Timer:
    """Median and least microseconds of a call."""

    def __init__(self, iterations: int) -> None:
        self.iterations = iterations
        self.flush = torch.empty(256 << 20, dtype=torch.uint8, device=DEVICE)

    def __call__(self, call: Call) -> tuple[float, float]:
        for _ in range(3):
            call()
        torch.cuda.synchronize()
        pairs = []
        for _ in range(self.iterations):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            self.flush.zero_()
            torch.cuda._sleep(200_000)  # 0.1 ms, in which the host enqueues the call
            begin.record()
            call()
            end.record()
            pairs.append((begin, end))
        torch.cuda.synchronize()
        times = [begin.elapsed_time(end) * 1e3 for begin, end in pairs]
        return statistics.median(times), min(times)


class Output:
    def __init__(self, path: pathlib.Path, timer: Timer) -> None:
        self.path = path
        self.timer = timer

    def time(self, peer: str, shape: str, call: Call, error: Call) -> None:
        try:
            call()
            torch.cuda.synchronize()
            wrong = float(error())  # type: ignore[arg-type]
            if not wrong <= LIMIT:
                raise RuntimeError(f"relative error {wrong:.2e}, limit {LIMIT}")
            us, least = self.timer(call)
        except RuntimeError as fault:
            print(f"{peer:28} {shape:34} no time: {str(fault).splitlines()[0]}", flush=True)
            if "CUDA error" in str(fault):
                raise SystemExit(1) from fault  # the context is lost
            return
        row = {"peer": peer, "shape": shape, "us": us, "least_us": least, "error": wrong}
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        print(f"{peer:28} {shape:34} {us:9.1f} us (least {least:.1f}), error {wrong:.1e}",
              flush=True)


class Scratch:
    """FlashMLA's plan and parts of results."""

    def __init__(self, library: ctypes.CDLL, batch: int, heads: int, top_k: int, extra: int,
                 lengths: torch.Tensor | None) -> None:
        parts = library.fm_parts(heads)
        self.meta = torch.empty(parts * 8, dtype=torch.int32, device=DEVICE)
        self.splits = torch.empty(batch + 1, dtype=torch.int32, device=DEVICE)
        self.o = torch.empty((batch + parts) * heads * VALUES, device=DEVICE)
        self.lse = torch.empty((batch + parts) * heads, device=DEVICE)
        pointer = ctypes.c_void_p() if lengths is None else at(lengths)
        ok(library.fm_plan(batch, heads, top_k, extra, pointer, at(self.meta), at(self.splits),
                           stream()))

    def addresses(self) -> list[ctypes.c_void_p]:
        return [at(self.meta), at(self.splits), at(self.o), at(self.lse)]


def random_rows(count: int, columns: int, generator: torch.Generator) -> torch.Tensor:
    rows = torch.empty(count, columns, dtype=torch.bfloat16, device=DEVICE)
    for part in rows.split(1 << 19):
        part.copy_(torch.randn(part.shape, generator=generator, device=DEVICE))
    return rows


def attend(queries: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """[heads, d] and [n, d] to [heads, 512] in fp32."""
    keys = rows.float()
    scores = queries.float() @ keys.T * SCALE
    return torch.softmax(scores, -1) @ keys[:, :VALUES]


class Dense:
    """q [batch, heads, 576]; kv [blocks, 64, 576], pages of a request in random order."""

    def __init__(self, batch: int, heads: int, context: int) -> None:
        generator = torch.Generator(device=DEVICE)
        generator.manual_seed(1)
        self.batch, self.heads, self.context = batch, heads, context
        self.width = (context + PAGE - 1) // PAGE
        self.blocks = batch * self.width
        self.kv = random_rows(self.blocks * PAGE, ROW, generator)
        order = torch.randperm(self.blocks, generator=generator, device=DEVICE)
        self.table = order.int().view(batch, self.width).contiguous()
        self.lengths = torch.full((batch,), context, dtype=torch.int32, device=DEVICE)
        self.q = random_rows(batch * heads, ROW, generator).view(batch, heads, ROW)
        self.out = torch.empty(batch, heads, VALUES, dtype=torch.bfloat16, device=DEVICE)
        self.lse = torch.empty(batch, heads, device=DEVICE)
        self.want = {i: attend(self.q[i], self.rows(i)) for i in {0, batch // 2, batch - 1}}

    def rows(self, request: int) -> torch.Tensor:
        pages = self.kv.view(self.blocks, PAGE, ROW)[self.table[request].long()]
        return pages.reshape(-1, ROW)[: self.context]

    def error(self) -> float:
        return max(relative(self.out[i], want) for i, want in self.want.items())

    def flash_mla(self, library: ctypes.CDLL) -> Call:
        scratch = Scratch(library, self.batch, self.heads, -1, 0, self.lengths)
        return lambda: ok(library.fm_dense(
            self.batch, self.heads, self.blocks, self.width, ctypes.c_float(SCALE), at(self.q),
            at(self.kv), at(self.table), at(self.lengths), at(self.out), at(self.lse),
            *scratch.addresses(), stream()))

    def flash_attention(self, library: ctypes.CDLL, by_pages: bool, planned: bool) -> Call:
        splits = library.fa3_splits(self.heads, self.width * PAGE)
        most = int(16e9 // (self.batch * self.heads * VALUES * 4))  # bytes of parts
        splits = max(1, min(splits, most))
        plan = torch.zeros(3 * ((self.batch + 3) // 4 * 4) + 1, dtype=torch.int32, device=DEVICE)
        o = torch.empty(splits * self.batch * self.heads * VALUES, device=DEVICE)
        lse = torch.empty(splits * self.batch * self.heads, device=DEVICE)

        def call(with_plan: bool = planned) -> None:
            ok(library.fa3_mla(
                self.batch, self.heads, self.width, self.blocks, PAGE, ctypes.c_float(SCALE),
                splits, int(by_pages), int(with_plan), at(self.q), at(self.kv), at(self.table),
                at(self.lengths), at(self.out), at(self.lse), at(plan), at(o), at(lse), stream()))

        if planned:
            call(False)
            torch.cuda.synchronize()
            # Left by the kernels where parts are merged, else by the next call.
            plan[-1] = 0
        return call


    def flash_infer(self, library: ctypes.CDLL) -> Call:
        floats = torch.empty(512 << 20, dtype=torch.uint8, device=DEVICE)
        words = torch.empty(16 << 20, dtype=torch.uint8, device=DEVICE)
        pinned = torch.empty(words.numel(), dtype=torch.uint8).pin_memory()
        rows = torch.arange(self.batch + 1, dtype=torch.int32)
        pages = torch.arange(self.batch + 1, dtype=torch.int32) * self.width
        lengths = torch.full((self.batch,), self.context, dtype=torch.int32)
        ok(library.fi_plan(at(floats), ctypes.c_size_t(floats.numel()), at(words), at(pinned),
                           ctypes.c_size_t(words.numel()), at(rows), at(pages), at(lengths),
                           self.batch, self.heads, stream()))
        torch.cuda.synchronize()
        return lambda: ok(library.fi_run(
            at(floats), at(words), at(self.q), at(self.kv), at(self.table), at(self.out),
            at(self.lse), self.heads, PAGE, ctypes.c_float(SCALE), stream()))


def dense(flags: argparse.Namespace, output: Output, mla: ctypes.CDLL | None,
          attention: ctypes.CDLL | None, infer: ctypes.CDLL | None) -> None:
    for heads in flags.heads:
        for context in flags.context:
            for batch in flags.batch:
                if batch * context * ROW * 2 > flags.max_gb * 1e9:
                    continue
                problem = Dense(batch, heads, context)
                shape = f"h={heads} b={batch} ctx={context}"

                def time(peer: str, make: collections.abc.Callable[[], Call]) -> None:
                    problem.out.fill_(float("nan"))
                    output.time(peer, shape, make(), problem.error)

                if mla is not None:
                    time("flashmla", lambda: problem.flash_mla(mla))
                if attention is not None:
                    for by_pages, copies in ((True, "tma"), (False, "cpasync")):
                        for planned in (True, False):
                            time(f"flashattention3-{copies}{'' if planned else '-plans'}",
                                 lambda: problem.flash_attention(attention, by_pages, planned))
                if infer is not None:
                    time("flashinfer", lambda: problem.flash_infer(infer))
                del problem
                torch.cuda.empty_cache()


def pack_v32(rows: torch.Tensor) -> torch.Tensor:
    """[n, 576] to [n, 656] bytes: 512 e4m3, 4 fp32 scales, 64 bf16."""
    count = rows.shape[0]
    values = rows[:, :VALUES].float().view(count, 4, 128)
    scales = torch.exp2((values.abs().amax(-1).clamp(min=1e-4) / 448).log2().ceil())
    codes = (values / scales.unsqueeze(-1)).to(torch.float8_e4m3fn)
    packed = torch.empty(count, 656, dtype=torch.uint8, device=DEVICE)
    packed[:, :512] = codes.view(torch.uint8).view(count, 512)
    packed[:, 512:528] = scales.contiguous().view(torch.uint8).view(count, 16)
    packed[:, 528:] = rows[:, VALUES:].contiguous().view(torch.uint8).view(count, 128)
    return packed


def unpack_v32(packed: torch.Tensor) -> torch.Tensor:
    count = packed.shape[0]
    codes = packed[:, :512].contiguous().view(torch.float8_e4m3fn).float().view(count, 4, 128)
    scales = packed[:, 512:528].contiguous().view(torch.float32)
    rotated = packed[:, 528:].contiguous().view(torch.bfloat16).float()
    return torch.cat([(codes * scales.unsqueeze(-1)).view(count, 512), rotated], 1)


def sparse(flags: argparse.Namespace, output: Output, mla: ctypes.CDLL) -> None:
    context, top_k = 16384, 2048
    for heads in (64, 128):
        for batch in flags.batch:
            generator = torch.Generator(device=DEVICE)
            generator.manual_seed(2)
            blocks = batch * context // PAGE
            kv = torch.empty(blocks * PAGE, 656, dtype=torch.uint8, device=DEVICE)
            for part in kv.split(1 << 19):
                part.copy_(pack_v32(random_rows(part.shape[0], ROW, generator)))
            lists = torch.stack([
                torch.randperm(context, generator=generator, device=DEVICE)[:top_k].sort().values
                + i * context for i in range(batch)]).int().contiguous()
            q = random_rows(batch * heads, ROW, generator).view(batch, heads, ROW)
            out = torch.full((batch, heads, VALUES), float("nan"), dtype=torch.bfloat16,
                             device=DEVICE)
            lse = torch.empty(batch, heads, device=DEVICE)
            scratch = Scratch(mla, batch, heads, top_k, 0, None)
            want = {i: attend(q[i], unpack_v32(kv[lists[i].long()])) for i in {0, batch - 1}}
            output.time(
                "flashmla", f"decode h={heads} b={batch} topk={top_k}",
                lambda: ok(mla.fm_sparse(batch, heads, top_k, blocks, ctypes.c_float(SCALE), at(q),
                                         at(kv), at(lists), at(out), at(lse), *scratch.addresses(),
                                         stream())),
                lambda: max(relative(out[i], x) for i, x in want.items()))
            del kv
            torch.cuda.empty_cache()


class V4Rows:
    """Blocks of 64 rows of 448 e4m3, 64 bf16 and, after all rows, 7 scales and a byte each."""

    def __init__(self, count: int, generator: torch.Generator) -> None:
        self.blocks = count // PAGE
        self.block_bytes = (PAGE * 584 + 575) // 576 * 576
        self.kv = torch.zeros(self.blocks, self.block_bytes, dtype=torch.uint8, device=DEVICE)
        for part in self.kv.split(1 << 12):
            rows = random_rows(part.shape[0] * PAGE, V4_ROW, generator)
            codes = rows[:, :V4_CODES].float().div(4).to(torch.float8_e4m3fn)
            body = torch.cat([codes.view(torch.uint8),
                              rows[:, V4_CODES:].contiguous().view(torch.uint8)], 1)
            part[:, : PAGE * 576] = body.view(-1, PAGE * 576)
            part[:, PAGE * 576: PAGE * 584] = 129  # e8m0: 4

    def rows(self, indices: torch.Tensor) -> torch.Tensor:
        block, place = indices.long() // PAGE, indices.long() % PAGE
        body = self.kv[:, : PAGE * 576].view(self.blocks, PAGE, 576)[block, place]
        codes = body[:, :V4_CODES].contiguous().view(torch.float8_e4m3fn).float() * 4
        return torch.cat([codes, body[:, V4_CODES:].contiguous().view(torch.bfloat16).float()], 1)


def window(flags: argparse.Namespace, output: Output, mla: ctypes.CDLL) -> None:
    context, ratio, seen, listed, heads = 8192, 4, 128, 512, 128
    for batch in flags.batch:
        generator = torch.Generator(device=DEVICE)
        generator.manual_seed(3)
        rows = V4Rows(batch * context, generator)
        entries = V4Rows(batch * context // ratio, generator)
        count = context // ratio
        last = torch.arange(context - seen, context, device=DEVICE)
        places = torch.stack([last + i * context for i in range(batch)]).int().contiguous()
        lists = torch.stack([
            torch.randperm(count, generator=generator, device=DEVICE)[:listed].sort().values
            + i * count for i in range(batch)]).int().contiguous()
        q = random_rows(batch * heads, V4_ROW, generator).view(batch, heads, V4_ROW)
        out = torch.full((batch, heads, VALUES), float("nan"), dtype=torch.bfloat16, device=DEVICE)
        lse = torch.empty(batch, heads, device=DEVICE)
        scratch = Scratch(mla, batch, heads, seen, listed, None)
        want = {i: attend(q[i], torch.cat([rows.rows(places[i]), entries.rows(lists[i])]))
                for i in {0, batch - 1}}
        output.time(
            "flashmla", f"window h={heads} b={batch} {seen}+{listed}",
            lambda: ok(mla.fm_window(batch, seen, listed, rows.blocks, entries.blocks,
                                     rows.block_bytes, ctypes.c_float(SCALE), at(q), at(rows.kv),
                                     at(places), at(entries.kv), at(lists), at(out), at(lse),
                                     *scratch.addresses(), stream())),
            lambda: max(relative(out[i], x) for i, x in want.items()))
        del rows, entries
        torch.cuda.empty_cache()


def prefill(output: Output, mla: ctypes.CDLL) -> None:
    heads, top_k, rows, context = 128, 2048, 1024, 8192
    generator = torch.Generator(device=DEVICE)
    generator.manual_seed(4)
    q = random_rows(rows * heads, ROW, generator).view(rows, heads, ROW)
    kv = random_rows(context, ROW, generator)
    lists = torch.stack([
        torch.randperm(context - rows + i + 1, generator=generator, device=DEVICE)[:top_k]
        .sort().values for i in range(rows)]).int().contiguous()
    out = torch.full((rows, heads, VALUES), float("nan"), dtype=torch.bfloat16, device=DEVICE)
    most, lse = (torch.empty(rows, heads, device=DEVICE) for _ in range(2))
    want = {i: attend(q[i], kv[lists[i].long()]) for i in (0, rows // 2, rows - 1)}
    output.time(
        "flashmla", f"prefill h={heads} rows={rows} kv={context} topk={top_k}",
        lambda: ok(mla.fm_sparse_prefill(rows, context, heads, top_k, ctypes.c_float(SCALE), at(q),
                                         at(kv), at(lists), at(out), at(most), at(lse), stream())),
        lambda: max(relative(out[i], x) for i, x in want.items()))


def main() -> None:
    def numbers(text: str) -> list[int]:
        return [int(x) for x in text.split(",")]

    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=pathlib.Path, required=True)
    parser.add_argument("--flash-mla", type=pathlib.Path)
    parser.add_argument("--flash-attention", type=pathlib.Path)
    parser.add_argument("--flash-infer", type=pathlib.Path)
    parser.add_argument("--modes", default="dense,sparse,window,prefill")
    parser.add_argument("--heads", type=numbers, default=[16, 128])
    parser.add_argument("--batch", type=numbers, default=[1, 16, 64, 128])
    parser.add_argument("--context", type=numbers, default=[1024, 4096, 16384, 65536])
    parser.add_argument("--iterations", type=int, default=30)
    parser.add_argument("--max-gb", type=float, default=20)
    flags = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = False
    print(torch.cuda.get_device_name(), torch.__version__)
    output = Output(flags.out, Timer(flags.iterations))

    def load(path: pathlib.Path | None) -> ctypes.CDLL | None:
        return None if path is None else ctypes.CDLL(str(path.resolve()))

    mla, attention, infer = (
        load(path) for path in (flags.flash_mla, flags.flash_attention, flags.flash_infer))
    modes = flags.modes.split(",")
    if "dense" in modes:
        dense(flags, output, mla, attention, infer)
    if mla is None:
        return
    if "sparse" in modes:
        sparse(flags, output, mla)
    if "window" in modes:
        window(flags, output, mla)
    if "prefill" in modes:
        prefill(output, mla)


if __name__ == "__main__":
    main()
