# SPDX-License-Identifier: MIT
"""Plant faults in kernels, one at a time, and demand that the kernels' contract turns red.

    .venv/bin/python tools/plant_faults.py

A fault is a text of a kernel and what stands in its place while tests run: those of the kernels
that have this text in tests/attention/test_kernel_designed.py and test_kernel_contract.py, or in
the file that the fault names. Nothing is built or installed: a loader of OpenCL changes the text
(tests/support/planted.py).

Rows of the table say which test found the fault, after how many seconds. The exit status is 1 if
no test did. A kernel whose instructions the processor lacks is skipped. Arguments choose faults by
parts of their names.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TESTS = ROOT / "tests"
ENVIRONMENT = os.environ | {"PYTHONPATH": str(TESTS)}
BUILD = "import sys; from support import faults; print(faults.build(sys.argv[1]))"

CONTRACT = "attention/test_kernel_designed.py", "attention/test_kernel_contract.py"
BACKWARD = ("attention/test_backward.py",)
FLEX_BACKWARD = ("attention/test_flex_backward.py",)
PAGES = "python/test_paged_cache.py", "python/test_quantize.py"
BATCHES = ("python/test_kv_cache_codes.py",)
RAGGED = ("attention/test_ragged.py",)
PAIRS = ("attention/test_bfloat16_pairs.py",)
MMA_RAGGED = ("attention/test_mma_sequences.py",)
BYTES = "attention/test_bytes.py", "python/test_paged_attend.py"


def to_half(x, as_real="as_float", as_bits="as_uint"):
    """Rounds a number of a half type's kernel to that type. Other kernels keep it as it is."""
    dropped = "(DTYPE == CA_KERNEL_FLOAT16 ? 13 : 16)"
    return f"""
#if DTYPE < CA_KERNEL_FLOAT32
    {x} = {as_real}(({as_bits}({x}) + (1 << {dropped} >> 1)) >> {dropped} << {dropped});
#endif
"""


@dataclass(frozen=True)
class Fault:
    """A text of a file below kernels/ and what stands in its place."""

    name: str
    file: str
    text: str
    instead: str
    kernels: str  # the variants whose tests run; "pages": all tests of its files
    tests: tuple[str, ...] = CONTRACT


FAULTS = [
    Fault("the last key of a split is lost", "attention/keys.clh",
          "first + min(count, start + length)};",
          "first + min(count, start + length) - (start > 0 && start < count)};",
          "decode_cpu decode_gpu decode_mma"),
    Fault("the last key of a block is lost", "attention/tiled/scores.clh",
          "min(BN, end - j0), tile->bounds};", "min(BN - 1, end - j0), tile->bounds};", "tiled"),
    Fault("causality is off by one", "attention/score.clh",
          "(distance <= PLACE_OF(bounds->upper))", "(distance < PLACE_OF(bounds->upper))",
          "cpu pairs tiled decode_cpu decode_gpu"),
    Fault("causality of strips is off by one", "attention/mma/softmax.clh",
          "min(bounds->upper + row + 1, bounds->limit)",
          "min(bounds->upper + row + 2, bounds->limit)", "mma decode_mma"),
    Fault("heads read the values of the first one", "attention/keys.clh",
          "run->value = value + ca_offset(value_view, batch, row, 0);",
          "const ca_int64 other[CA_BATCH_DIMS] = {batch[0], batch[1], 0};"
          "run->value = value + ca_offset(value_view, other, row, 0);",
          "cpu tiled decode_cpu decode_gpu"),
    Fault("weights are rounded to half", "attention/cpu/softmax.clh",
          "x[n] = weight_in(in_log2, score - base[n % NV]);",
          "x[n] = weight_in(in_log2, score - base[n % NV]);"
          + to_half("x[n]", "as_realv", "as_intv"), "cpu"),
    Fault("values are summed in half", "attention/decode_gpu.cl",
          "*sum = fma(weights[r], x[e], *sum);",
          "*sum = fma(weights[r], x[e], *sum);" + to_half("*sum"), "decode_gpu"),
    Fault("scores are rounded to half", "attention/score.clh",
          "score = cap_score(params, score);",
          "score = cap_score(params, score);" + to_half("score"),
          "decode_gpu decode_mma"),
    Fault("no rescale after a late maximum", "attention/decode_cpu.cl",
          "result[slot_of(r, n, Ev)] *= decay[r];", "(void)decay;", "decode_cpu"),
    Fault("no rescale when bases rise", "attention/mma/softmax.clh",
          "result[m][c] = scale_rows(result[m][c], low, high);", "", "mma decode_mma"),
    Fault("no rescale after a heavy strip", "attention/cpu/softmax.clh",
          "scale_result(result, factor, Ev, rows);", "", "cpu pairs"),
    Fault("a barrier is gone", "attention/tiled.cl",
          "barrier(CLK_LOCAL_MEM_FENCE); /* these writes: the reads */", "", "tiled"),
    Fault("a tile of values is stale", "attention/tiled.cl",
          "load_values(tile, run, first, block, k0);", "", "tiled"),
    Fault("a row that NaN has reached is not computed again", "support/common.clh",
          "atomic_max(&call->redo[call->params->redo_slot], call->params->redo_mark);", "",
          "cpu tiled mma decode_cpu decode_gpu"),
    Fault("a mask of NaN excludes", "attention/score.clh",
          "return added != (score_t)(-INFINITY) ? sum : added;",
          "return added > (score_t)(-INFINITY) ? sum : (score_t)(-INFINITY);",
          "cpu tiled decode_cpu decode_gpu"),
    Fault("a split is counted twice", "attention/decode_cpu.cl",
          "const realv factor = weight_of(params, (realv)(row[Ev] - base));",
          "const realv factor = weight_of(params, (realv)(row[Ev] - base)) * (split == 1 ? 2 : 1);",
          "decode_cpu"),
    Fault("a split is counted twice on GPUs", "attention/decode_gpu_merge.cl",
          "partial_row(&call, batch, i, split, PARTIAL_SIZE);",
          "partial_row(&call, batch, i, split == 1 ? 0 : split, PARTIAL_SIZE);", "decode_gpu"),
    # Of 30 bits: with 32 the kernel would read where no memory is.
    Fault("an offset is cut", "support/view.clh",
          "offset += batch[n] * view->batch[n];",
          "offset += batch[n] * view->batch[n] & ((1 << 30) - 1);",
          "cpu tiled mma decode_cpu decode_gpu"),
    Fault("the log-sum-exp lacks the sink", "attention/score.clh",
          "return USES(params, SINKS) ? add_sink(call, batch, lse) : lse;", "return lse;",
          "cpu tiled decode_cpu decode_gpu", ("attention/test_sinks.py",)),
    Fault("weights lack the sink", "attention/cpu/row_sums.clh",
          "add_sinks(&of->softmax, tile);", "", "cpu", ("attention/test_return_weights.py",)),
    Fault("weights lack the sink on GPUs", "attention/tiled_scores.cl",
          "softmax.sum[m] += weight_of_sink(&call, tile.batch, softmax.base[m]);", "", "tiled",
          ("attention/test_return_weights.py",)),
    Fault("the log-sum-exp is in units of log 2", "attention/score.clh",
          "const real lse = attends ? TO_NATURAL(params, base) + log(sum) : -INFINITY;",
          "const real lse = attends ? base + log(sum) : -INFINITY;", "cpu tiled decode_gpu"),
    Fault("a softcap lacks its inner factor", "attention/score.clh",
          "CAP(score * ca_inverse_softcap(params)) * ca_softcap(params)",
          "CAP(score) * ca_softcap(params)", "cpu tiled decode_cpu decode_gpu mma"),
    Fault("the log-sum-exp of a row without a key is 0", "attention/score.clh",
          "TO_NATURAL(params, base) + log(sum) : -INFINITY;",
          "TO_NATURAL(params, base) + log(sum) : REAL(0.0);", "cpu tiled decode_cpu decode_gpu"),
    Fault("the last of an odd number of elements is lost", "attention/cpu/pairs.clh",
          "pair_of(c < columns ? row[c * stride] : 0,",
          "pair_of(c + 1 < columns ? row[c * stride] : 0,", "pairs amx"),
    Fault("weights of a pair are swapped", "attention/cpu/pairs.clh",
          "return low >> 16 | (high & 0xffff0000u);", "return high >> 16 | (low & 0xffff0000u);",
          "pairs amx"),
    Fault("the sum lacks every second weight", "attention/cpu/pairs.clh",
          "const term ones = 0x3f803f80u;", "const term ones = 0x3f80u;", "pairs"),
    Fault("few keys in pages are one block", "attention/cpu/products.clh",
          "apart = sequences_header(call)[CA_HEADER_PAGE_SIZE] > 0;", "", "pairs", PAIRS),
    Fault("scores of pairs are not scaled", "attention/cpu/vectors.clh",
          "scores[n] = BFLOAT16_PAIRS ? sums[n] * scale : sums[n];", "scores[n] = sums[n];",
          "pairs"),
    Fault("values of odd keys are those of even ones", "attention/cpu/pairs.clh",
          "return x[0] | x[1] << 16;", "return x[0] | x[0] << 16;", "amx"),
    Fault("a matrix of sums is stored twice", "attention/cpu/amx.clh",
          "AMX_STORE(2, to + SUM_VECTORS, SUM_BYTES);",
          "AMX_STORE(0, to + SUM_VECTORS, SUM_BYTES);", "amx"),
    Fault("sums of a block replace those before", "attention/cpu/amx.clh",
          "load_sums(to, lower);", "clear_sums();", "amx"),
    Fault("scores of matrices are not scaled", "attention/cpu/amx.clh",
          "scores[n] *= scale;", "(void)scale;", "amx"),
    Fault("no rescale of sums of matrices", "attention/cpu/amx.clh",
          "result[n] *= factor[n % NV];", "(void)factor;", "amx"),
    Fault("gradients lack delta", "attention/cpu_backward/blocks.clh",
          "weight * (grad - of->delta[v]) * scale", "weight * grad * scale", "fastest", BACKWARD),
    Fault("the softcap has no slope", "attention/cpu_backward/blocks.clh",
          "grad *= (realv)REAL(1.0) - share * share;", "", "fastest", BACKWARD),
    Fault("what dropout drops has a gradient", "attention/cpu_backward/blocks.clh",
          "grad *= kept[n];", "", "fastest", BACKWARD),
    Fault("what is excluded adds", "attention/cpu_backward/blocks.clh",
          "grad = excluded ? (realv)REAL(0.0) : grad;", "", "fastest", BACKWARD),
    Fault("a block's sums replace those before", "attention/cpu_backward.cl",
          "result[n] = adds ? result[n] + x : x;", "result[n] = x * REAL(0.0);", "fastest",
          BACKWARD),
    Fault("parts of a head are lost", "attention/cpu_backward.cl",
          "part < call->params->splits", "part < 1", "fastest", BACKWARD),
    Fault("gradients that NaN has reached are not computed again", "support/common.clh",
          "atomic_max(&call->redo[call->params->redo_slot], call->params->redo_mark);", "",
          "fastest", BACKWARD),
    Fault("weights of large scores add up to more than 1", "attention/gradients.clh",
          "fabs(lse) > LARGE_LSE", "false", "fastest tiled", BACKWARD),
    Fault("the gradient of the log-sum-exp is forgotten", "attention/gradients.clh",
          "if (USES(params, GRAD_LSE))", "if (false)", "fastest tiled", BACKWARD),
    Fault("a mask's gradient lacks the heads but the first", "attention/cpu_backward/scores.clh",
          "n < count_of(divided.shared) && !is_stopped(call)", "n < 1", "fastest", BACKWARD),
    Fault("gradients on GPUs lack delta", "attention/pairs.clh",
          "weight * (grad - numbers[a].delta) * slope", "weight * grad * slope", "tiled mma",
          BACKWARD),
    Fault("the softcap has no slope on GPUs", "attention/pairs.clh",
          "slope *= REAL(1.0) - share * share;", "", "tiled mma", BACKWARD),
    Fault("what dropout drops has a gradient on GPUs", "attention/pairs.clh",
          "drops ? REAL(0.0) : grads[n] * kept;", "grads[n] * kept;", "tiled", BACKWARD),
    Fault("what is excluded adds on GPUs", "attention/pairs.clh",
          "sees_all(&block->bounds, r, rows, k, keys);", "true;", "tiled mma", BACKWARD),
    Fault("rows without a key are not cleared", "attention/tiled_backward/pairs.clh",
          "own->shared[VALUES_AT + n] = (real4)REAL(0.0);", "", "tiled", BACKWARD),
    Fault("a part of a block is stale", "attention/tiled_backward/pairs.clh",
          "rows, k0, 0, size);", "rows, 0, 0, size);", "tiled", BACKWARD),
    Fault("the last rows that see a key are lost", "attention/pairs.clh",
          "last - bounds->lower + 1)", "last - bounds->lower)", "tiled mma", BACKWARD),
    Fault("heads that share a key are lost", "attention/tiled_backward.cl",
          "own.batch, n, batch);", "own.batch, 0, batch);", "tiled", BACKWARD),
    Fault("the user's score has no slope on GPUs", "attention/pairs.clh",
          "slope *= mod_score_slope(call, &row.mod, key, product);", "", "tiled", FLEX_BACKWARD),
    Fault("gradients on GPUs lack the user's score", "attention/pairs.clh",
          "cap_score(params, modified)", "cap_score(params, product)", "tiled", FLEX_BACKWARD),
    Fault("heads that share a key are lost on matrix units", "attention/mma_backward.cl",
          "own_batch, n, batch);", "own_batch, 0, batch);", "mma", BACKWARD),
    Fault("factors of a strip multiply its first lines", "attention/mma_backward.cl",
          "add_rows(warp, a, strip, 8 * k, chunks, sums);",
          "add_rows(warp, a, strip, 0, chunks, sums);", "mma", BACKWARD),
    Fault("rows have the numbers of the first one", "attention/mma_backward.cl",
          "min(i + ROW_BEHIND(a), last)", "min(i, last)", "mma", BACKWARD),
    Fault("a block of the ring is stale", "attention/mma_backward.cl",
          "(RING_START + stage * STAGE_CHUNKS)", "(RING_START)", "mma", BACKWARD),
    Fault("sums computed anew lack the sink", "attention/tiled_backward/numbers.clh",
          "softmax->sum[m] += weight_of_sink(call, tile->batch, softmax->base[m]);", "", "tiled",
          BACKWARD),
    Fault("gradients on GPUs that NaN has reached are not computed again",
          "support/common.clh",
          "atomic_max(&call->redo[call->params->redo_slot], call->params->redo_mark);", "",
          "tiled", BACKWARD),
    Fault("gradients of the reference lack delta", "attention/backward.cl",
          "(pair->kept * sum - state->delta)", "pair->kept * sum", "reference", BACKWARD),
    Fault("the softcap of the reference has no slope", "attention/backward.cl",
          "REAL(1.0) - share * share", "REAL(1.0)", "reference", BACKWARD),
    Fault("a key adds only to the first columns", "attention/backward.cl",
          "own, row - entry * rows, part * COLUMNS, size", "own, row - entry * rows, 0, size",
          "reference", BACKWARD),
    Fault("rows of odd pages go to even ones", "pages/places.clh",
          "(page * heads + head)", "((page & ~1) * heads + head)", "pages", PAGES),
    Fault("all heads are the first one", "pages/places.clh",
          "vector->head = adjoin ? inner_index :", "vector->head = adjoin ? 0 :", "pages", PAGES),
    Fault("sequences of a batch are the first one", "pages/places.clh",
          "vector->from += entry * params->entry +", "vector->from +=", "pages", BATCHES),
    Fault("padding is written", "pages/quantize.cl",
          "if (vector.place < 0) {", "if (false) {", "pages", BATCHES),
    Fault("rows that follow each other end a page late", "pages/places.clh",
          "vector->left + 1);", "vector->left + 2);", "pages", PAGES),
    Fault("keys of a batch have the scales of the first one", "attention/keys.clh",
          "call->member + ca_offset(VIEW(params, role), batch, row, 0);",
          "call->member + row * VIEW(params, role)->row;", "pages", BATCHES),
    Fault("a page is copied from the wrong row", "pages/places.clh",
          "places[params->rows + row]", "places[row]", "pages", PAGES),
    Fault("the last number of a vector is lost", "pages/copy.cl",
          "count * params.size);", "count * params.size - 1);", "pages", PAGES),
    Fault("a range lacks the negative numbers", "pages/quantize.cl",
          "MORE(-range.low, range.high)", "range.high", "pages", PAGES),
    Fault("tiny vectors have codes", "pages/quantize.cl",
          "#define SMALLEST_SCALE 0x1p-120f", "#define SMALLEST_SCALE 0x1p-126f", "pages", PAGES),
    Fault("NaN is no longer visible", "pages/quantize.cl",
          "!range->finite ? NAN", "!range->finite ? 1.0f", "pages", PAGES),
    Fault("codes are truncated", "pages/quantize.cl",
          "as_intv(x + (realv)WITHOUT_FRACTION)",
          "as_intv(trunc(x) + (realv)WITHOUT_FRACTION)", "pages", PAGES),
    Fault("ties of float8 are rounded up", "pages/quantize.cl",
          "(magnitude >> DROPPED & 1)", "1", "pages", PAGES),
    Fault("float8 does not saturate", "pages/quantize.cl",
          ", (intv)LARGEST)", ", (intv)127)", "pages", PAGES),
    Fault("a group lacks its offset", "pages/quantize.cl",
          "count) * 0.5f - (realv)half_low;", "count) * 0.5f;", "pages", PAGES),
    Fault("codes of a byte are swapped", "pages/quantize.cl",
          "convert_pairs(codes.even | codes.odd << 4)",
          "convert_pairs(codes.odd | codes.even << 4)", "pages", PAGES),
    Fault("pages are those of the first sequence", "attention/keys.clh",
          "header[CA_HEADER_PAGES] + first + number", "header[CA_HEADER_PAGES] + number",
          "fastest tiled reference", RAGGED),
    Fault("a run passes the end of its page", "attention/keys.clh",
          "run->count = min(run->left, page_size - row);", "run->count = run->left;",
          "fastest tiled", RAGGED),
    Fault("the next page has the values of this one", "attention/keys.clh",
          "run->value += run->value_ahead - run->row", "run->value += 0 - run->row",
          "fastest", RAGGED),
    Fault("all sequences have the band of the first one", "attention/keys.clh",
          "{numbers[CA_SEQUENCE_LOWER], numbers[CA_SEQUENCE_UPPER]",
          "{sequence_numbers(call, 0)[CA_SEQUENCE_LOWER],"
          " sequence_numbers(call, 0)[CA_SEQUENCE_UPPER]", "fastest tiled reference", RAGGED),
    Fault("sequences share partial rows", "attention/splits.clh",
          "sequences_header(call)[CA_HEADER_PARTIAL] + numbers[CA_SEQUENCE_PARTIAL] +",
          "sequences_header(call)[CA_HEADER_PARTIAL] +", "fastest", RAGGED),
    Fault("tiles of a sequence have its first rows", "attention/mma/tiles.clh",
          "[CA_SEQUENCE_ROW] + range[CA_RANGE_FIRST];", "[CA_SEQUENCE_ROW];", "mma", MMA_RAGGED),
    Fault("sequences have the keys of the first one", "attention/mma/tiles.clh",
          "sequence_numbers(call, tile->batch[0])[CA_SEQUENCE_KEY] + tile->first;",
          "tile->first;", "mma", MMA_RAGGED),
    Fault("sequences have the pages of the first one", "attention/mma/tiles.clh",
          "header[CA_HEADER_PAGES] + numbers[CA_SEQUENCE_KEY];", "header[CA_HEADER_PAGES];", "mma",
          MMA_RAGGED),
    Fault("a window's first block passes the end of its page", "attention/mma/tiles.clh",
          "PAGED == CA_BLOCKS_IN_PAGES ? tile.first % BN : 0;", "0;", "mma", MMA_RAGGED),
    Fault("blocks of the next page are those of the first one", "attention/mma/chunks.clh",
          "source->pages[number] * source->page + row", "source->pages[0] * source->page + row",
          "mma", MMA_RAGGED),
    Fault("a work-item's rows stay in a page", "attention/mma/chunks.clh",
          "number += pages + (behind ? 1 : 0);", "number += pages;", "mma", MMA_RAGGED),
    Fault("few rows see the pages of the first sequence", "attention/decode_mma.cl",
          "header[CA_HEADER_PAGES] + numbers[CA_SEQUENCE_KEY];", "header[CA_HEADER_PAGES];",
          "decode_mma", MMA_RAGGED),
    Fault("keys of a split lie in the pages of the first one", "attention/decode_mma.cl",
          "(uint)source->start + (uint)key;", "(uint)key;", "decode_mma", MMA_RAGGED),
    Fault("values have the scales of keys", "attention/keys.clh",
          "(real)run->value_scale[k *", "(real)run->key_scale[k *", "tiled reference decode_gpu",
          BYTES),
    Fault("scales are those of the block before", "attention/decode_gpu.cl",
          "mine, j0 + ahead - start, next);", "mine, j0 - start, next);", "decode_gpu", BYTES),
    Fault("float8 has another bias", "support/lanes.clh",
          "* 256.0f", "* 128.0f", "fastest", BYTES),
    Fault("values of vectors have the scales of keys", "attention/decode_cpu/runs.clh",
          "(of_values ? runs->run.value_scale : runs->run.key_scale)", "runs->run.key_scale",
          "fastest", BYTES),
    Fault("int4 of a byte are swapped", "attention/int4.clh",
          "codes.even = bytes & (half_ucharv)15;", "codes.even = bytes >> (half_ucharv)4;",
          "pages", BYTES),
]  # fmt: skip


def run_tests(fault, kernels, library, words, folder):
    """(whether a test failed, what to say of it) of the tests of some variants.

    None in the place of whether: all are skipped.
    """
    chosen = " or ".join(
        f"{start}{kernel}{end}" for kernel in kernels for start in "-[" for end in "-]"
    )
    env = ENVIRONMENT | {
        "XDG_CACHE_HOME": str(folder),  # programs of the cache are without the fault
        "FAULTS_LIBRARY": str(library),
        "FAULTS_TEXT": fault.text,
        "FAULTS_INSTEAD": fault.instead,
        "CLATTN_TEST_DEVICES": words,
    }
    only = [] if kernels == ["pages"] else [f"-k={chosen}"]
    chosen = ["-m", "full or not full", *only, *(TESTS / file for file in fault.tests)]
    command = [sys.executable, "-m", "pytest", "-q", "-x", "--tb=line", "-p", "no:cacheprovider",
               "-p", "support.planted", *chosen]  # fmt: skip
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    planted = re.search(r"planted in (\d+) programs", done.stdout)
    if done.returncode == 1:
        failed = re.search(r"^FAILED \S+?::(.+?)( - .*)?$", done.stdout, re.MULTILINE)
        if planted and int(planted[1]) and failed:
            return True, failed[1]
    if done.returncode == 0 and planted and int(planted[1]):
        return False, "NOT FOUND"
    skipped = re.search(r"^SKIPPED .*?: (the processor .+|the driver .+|Intel's .+)$", done.stdout,
                        re.MULTILINE)  # fmt: skip
    if done.returncode == 0 and skipped and " passed" not in done.stdout:
        return None, f"skipped: {skipped[1]}"
    return False, f"exit {done.returncode}: {done.stdout[-2000:]}{done.stderr[-2000:]}"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="parts of the names of faults")
    parser.add_argument("--device", default="cpu", help="a type, or a part of a name or platform")
    arguments = parser.parse_args()
    missed = 0
    print("| fault | kernel | found by | seconds |")
    print("|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        library = subprocess.run([sys.executable, "-c", BUILD, folder], env=ENVIRONMENT, text=True,
                                 stdout=subprocess.PIPE, check=True).stdout.strip()  # fmt: skip
        for fault in FAULTS:
            if arguments.names and not any(name in fault.name for name in arguments.names):
                continue
            for number, kernel in enumerate(fault.kernels.split()):
                start = time.monotonic()
                cache = Path(folder) / f"{fault.name} {number}"
                found, words = run_tests(fault, [kernel], library, arguments.device, cache)
                missed += found is False
                seconds = time.monotonic() - start
                print(f"| {fault.name} | {kernel} | {words} | {seconds:.0f} |", flush=True)
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main())
