# SPDX-License-Identifier: MIT
"""A device for clattn whose kernels machine.py executes, by way of opencl_machine.c and its back
end interpreted_machine.c.

clattn takes it for an NVIDIA GPU, and plans and launches as on one. Results are what the PTX
computes that clang makes of the kernel.

CLATTN_PTX names a folder with PTX that a driver's compiler made: what tools/gpu_check brings back
in programs.zip. It is executed in the place of clang's where kernel and macros are the same.

The folder `ptx` beside the loader, if there is one, keeps clang's PTX for the next process.
"""

import ctypes
import hashlib
import os
import re
import tempfile
import traceback
from pathlib import Path

import numpy as np
from machine_code import nvidia

from ptx.machine import Machine, Refused

OUT_OF_RESOURCES = -5

# The interpreter knows no calls, which attention/reference.cl has.
INLINE = ("-Dnoinline=always_inline", "-mllvm", "-inline-threshold=100000")

# What the text of a program begins with that was made from a binary: the header that
# interpreted_machine.c gives binaries, before and after clattn changes their target. The program's
# source comes behind it.
HEADERS = (b".target sm_90\n//@90a .mark\n", RETARGETED := b".target sm_90a\n.mark\n")


def split_header(text):
    found = [header for header in HEADERS if text.startswith(header)]
    return (found[0], text.removeprefix(found[0])) if found else (None, text)


class Argument(ctypes.Structure):
    _fields_ = (("bytes", ctypes.c_void_p), ("size", ctypes.c_size_t),
                ("is_buffer", ctypes.c_int32))  # fmt: skip

    def value(self):
        """Returns an argument as Machine.launch takes it."""
        if not self.is_buffer:
            return ctypes.string_at(self.bytes, self.size)
        if not self.bytes:
            return None
        contents = (ctypes.c_ubyte * self.size).from_address(self.bytes)
        return np.frombuffer(contents, np.uint8), self.bytes


LAUNCH = ctypes.CFUNCTYPE(
    ctypes.c_int32, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_uint32,
    ctypes.POINTER(Argument), ctypes.c_size_t, ctypes.c_size_t,
)  # fmt: skip


class Device:
    """The device, in this process and before clattn opens any other.

    `library` is the loader, built. `edit`, to see faults, is a regular expression and what
    to put in its place in the PTX of all kernels but the probe, or of those that have `edited_name`
    in their names.
    """

    def __init__(self, library):
        import clattn._host.drivers as drivers

        memory = os.environ.get("CLATTN_MEMORY") or "host"  # where buffers are as long as arrays
        drivers.discover = lambda: ((), (os.fsencode(library),), None, memory)
        self.edit = None
        self.edited_name = ""
        self.library = ctypes.CDLL(library)
        self.function = LAUNCH(self.launch)
        ctypes.c_void_p.in_dll(self.library, "machine_launch").value = ctypes.cast(
            self.function, ctypes.c_void_p
        ).value
        self.programs, _ = nvidia.find_programs()
        self.given = given_texts(os.environ.get("CLATTN_PTX"))
        self.kept = Path(library).parent / "ptx"
        self.texts = {}
        self.machines = {}
        self.launched = []  # kernels and their macros
        self.refusal = None  # what the last launch was refused for

    def launch(self, source, options, name, count, arguments, groups, local):
        self.refusal = None
        try:
            name, options = name.decode(), options.decode()
            header, source = split_header(source)
            macros = tuple(o for o in options.split() if o.startswith("-D"))
            machine = self.machine(source, macros, name, local, header == RETARGETED)
            self.launched.append((name, dict(m[2:].split("=") for m in macros)))
            machine.launch(groups, [arguments[n].value() for n in range(count)])
        except Exception as error:
            self.refusal = f"{name}: {error}"
            print(self.refusal)
            if not isinstance(error, Refused):
                traceback.print_exc()
            return OUT_OF_RESOURCES
        return 0

    def machine(self, source, macros, name, local, retargeted):
        key = (source, name, macros, local, self.edit, retargeted)
        if key not in self.machines:
            text = self.edited(source, macros, name)
            text = nvidia.retarget(text) if retargeted else text
            self.machines[key] = Machine(text, name, local)
        return self.machines[key]

    def ptx(self, source, macros, name):
        key = (source, name, macros)
        if title(name, macros) in self.given:
            return self.given[title(name, macros)]
        if key not in self.texts:
            long = name == "attention_reference" or "-DHAS_SCORE_MOD=1" in macros
            more = INLINE if long else ()
            self.texts[key] = self.made(source, (*macros, *more))
        return self.texts[key]

    def made(self, source, options):
        """Returns clang's PTX, made now or by an earlier process."""
        digest = hashlib.sha256(b"\0".join([source, *map(str.encode, options)])).hexdigest()
        kept = self.kept / f"{digest}.ptx"
        if kept.exists():
            return kept.read_text()
        with tempfile.TemporaryDirectory() as folder:
            kernel, ptx = Path(folder) / "kernel.cl", Path(folder) / "kernel.ptx"
            kernel.write_bytes(source)
            nvidia.to_ptx(self.programs, kernel, options, ptx)
            text = ptx.read_text()
        if self.kept.exists():
            whole = kept.with_suffix(f".{os.getpid()}")
            whole.write_text(text)
            whole.replace(kept)
        return text

    def edited(self, source, macros, name):
        text = self.ptx(source, macros, name)
        if self.edit is None or name.startswith("probe") or self.edited_name not in name:
            return text
        pattern, new = self.edit
        changed = re.sub(pattern, new, text)
        assert changed != text, f"{pattern} is not in the PTX"
        return changed


def title(kernel, macros):
    """Returns the name of a program: its kernel and macros, as the first line of a file has it."""
    return " ".join([kernel, *sorted(macro.removeprefix("-D") for macro in macros)])


def given_texts(folder):
    """Returns the PTX in a folder by the programs' names."""
    files = sorted(Path(folder).glob("*.ptx")) if folder else []
    return {text.partition("\n")[0][3:]: text for text in (file.read_text() for file in files)}
