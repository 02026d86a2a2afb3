// SPDX-License-Identifier: Apache-2.0
// The Python module `_native`; its types are in nixl/native.py.
#include <Python.h>

#include <cstdint>
#include <exception>
#include <limits>
#include <new>
#include <vector>

#include "blake2b.h"
#include "planner.h"

namespace {

using nixl_planner::Blake2b;
using nixl_planner::OutOfRange;
using nixl_planner::Table;

// Raised with every change of what the functions take or give; nixl/native.py expects
// the same number.
constexpr long kInterface = 1;

// A buffer of int32, held until the end of the call.
class Int32Buffer {
 public:
  Int32Buffer() = default;
  Int32Buffer(const Int32Buffer &) = delete;
  Int32Buffer &operator=(const Int32Buffer &) = delete;
  Int32Buffer(Int32Buffer &&other) noexcept : view_(other.view_) {
    other.view_ = Py_buffer{};
  }
  ~Int32Buffer() {
    if (view_.obj != nullptr) PyBuffer_Release(&view_);
  }

  // False with an exception set where `object` is no contiguous buffer of int32.
  bool take(PyObject *object, int flags) {
    if (PyObject_GetBuffer(object, &view_, flags) != 0) {
      view_ = Py_buffer{};
      return false;
    }
    if (view_.len % static_cast<Py_ssize_t>(sizeof(std::int32_t)) != 0) {
      PyErr_SetString(PyExc_ValueError, "a buffer of int32 is expected");
      return false;
    }
    return true;
  }

  std::int32_t *data() const { return static_cast<std::int32_t *>(view_.buf); }
  std::size_t size() const {
    return static_cast<std::size_t>(view_.len) / sizeof(std::int32_t);
  }

 private:
  Py_buffer view_{};
};

enum Field { kLocal, kRemote, kStep, kLocalOut, kRemoteOut, kRuns, kFields };

// False with an exception set where `row` is no well-formed table.
bool parse_table(PyObject *row, std::vector<Int32Buffer> &held, Table &table) {
  if (!PyTuple_Check(row) || PyTuple_Size(row) != kFields) {
    PyErr_SetString(PyExc_TypeError, "a table is a tuple of six");
    return false;
  }
  std::int32_t *data[kFields] = {};
  std::size_t size[kFields] = {};
  for (int field = 0; field < kFields; ++field) {
    if (field == kStep) continue;
    const int flags = field > kStep ? PyBUF_WRITABLE : PyBUF_SIMPLE;
    Int32Buffer buffer;
    if (!buffer.take(PyTuple_GetItem(row, field), flags)) return false;
    data[field] = buffer.data();
    size[field] = buffer.size();
    held.push_back(std::move(buffer));
  }
  const Py_ssize_t length = PyLong_AsSsize_t(PyTuple_GetItem(row, kStep));
  if (length == -1 && PyErr_Occurred() != nullptr) return false;
  const auto step = static_cast<std::size_t>(length);
  const std::size_t blocks = size[kLocal];
  if (length < 1 || size[kRemote] != blocks || size[kLocalOut] != blocks ||
      size[kRemoteOut] != blocks ||
      size[kRuns] != blocks / step + (blocks % step != 0)) {
    PyErr_SetString(PyExc_ValueError, "sizes of a table's buffers do not agree");
    return false;
  }
  table = Table{data[kLocal],    data[kRemote],    blocks,     step,
                data[kLocalOut], data[kRemoteOut], data[kRuns]};
  return true;
}

// Runs `work` without the GIL where `release` says so. Nothing may leave `work`
// between the two: the thread would go on without its state.
template <typename Work>
bool run(bool release, Work work) {
  PyThreadState *state = release ? PyEval_SaveThread() : nullptr;
  bool enough_memory = true;
  try {
    work();
  } catch (const std::exception &) {
    enough_memory = false;
  }
  if (state != nullptr) PyEval_RestoreThread(state);
  if (!enough_memory) PyErr_NoMemory();
  return enough_memory;
}

bool integer(PyObject *object, std::int64_t &value) {
  value = PyLong_AsLongLong(object);
  return value != -1 || PyErr_Occurred() == nullptr;
}

bool arguments(const char *name, Py_ssize_t given, Py_ssize_t wanted) {
  if (given == wanted) return true;
  PyErr_Format(PyExc_TypeError, "%s takes %zd arguments, not %zd", name, wanted, given);
  return false;
}

PyObject *pair_tables(PyObject *, PyObject *const *args, Py_ssize_t given) try {
  std::int64_t local_count = 0;
  std::int64_t remote_count = 0;
  std::int64_t release_above = 0;
  if (!arguments("pair_tables", given, 4) || !integer(args[1], local_count) ||
      !integer(args[2], remote_count) || !integer(args[3], release_above)) {
    return nullptr;
  }
  if (!PyList_Check(args[0])) {
    PyErr_SetString(PyExc_TypeError, "tables are given as a list");
    return nullptr;
  }
  std::vector<Int32Buffer> held;
  std::vector<Table> tables;
  std::int64_t work = 0;
  const Py_ssize_t count = PyList_Size(args[0]);
  for (Py_ssize_t i = 0; i < count; ++i) {
    Table table{};
    if (!parse_table(PyList_GetItem(args[0], i), held, table)) return nullptr;
    tables.push_back(table);
    work += static_cast<std::int64_t>(table.blocks);
  }
  bool fits = false;
  OutOfRange wrong{};
  if (!run(work > release_above, [&] {
        fits = nixl_planner::pair_tables(tables, local_count, remote_count, wrong);
      })) {
    return nullptr;
  }
  if (fits) return Py_NewRef(Py_None);
  return Py_BuildValue("(nOii)", static_cast<Py_ssize_t>(wrong.table),
                       wrong.is_remote ? Py_True : Py_False, wrong.lowest,
                       wrong.highest);
} catch (const std::bad_alloc &) {
  return PyErr_NoMemory();
}

PyObject *expand(PyObject *, PyObject *const *args, Py_ssize_t given) {
  std::int64_t pages = 0;
  std::int64_t release_above = 0;
  if (!arguments("expand", given, 5) || !integer(args[2], pages) ||
      !integer(args[4], release_above)) {
    return nullptr;
  }
  Int32Buffer ids;
  Int32Buffer regions;
  Int32Buffer out;
  if (!ids.take(args[0], PyBUF_SIMPLE) || !regions.take(args[1], PyBUF_SIMPLE) ||
      !out.take(args[3], PyBUF_WRITABLE)) {
    return nullptr;
  }
  // In this order neither product can overflow.
  const bool fits = ids.size() == 0 || regions.size() == 0
                        ? out.size() == 0
                        : out.size() % ids.size() == 0 &&
                              out.size() / ids.size() == regions.size();
  if (!fits) {
    PyErr_SetString(PyExc_ValueError, "room for blocks times regions is expected");
    return nullptr;
  }
  if (!run(static_cast<std::int64_t>(out.size()) > release_above, [&] {
        nixl_planner::expand(ids.data(), ids.size(), regions.data(), regions.size(),
                             pages, out.data());
      })) {
    return nullptr;
  }
  return Py_NewRef(Py_None);
}

// False with an exception set where an entry is no integer of 64 bits.
bool read_tokens(PyObject *list, std::vector<std::int64_t> &tokens) {
  if (!PyList_Check(list)) {
    PyErr_SetString(PyExc_TypeError, "token ids are given as a list");
    return false;
  }
  tokens.resize(static_cast<std::size_t>(PyList_Size(list)));
  for (std::size_t i = 0; i < tokens.size(); ++i) {
    // Converting an entry may run Python code, which may shorten the list.
    PyObject *entry = PyList_GetItem(list, static_cast<Py_ssize_t>(i));
    if (entry == nullptr || !integer(entry, tokens[i])) return false;
  }
  return true;
}

PyObject *token_digests(PyObject *, PyObject *const *args, Py_ssize_t given) try {
  std::int64_t block = 0;
  std::int64_t digest_size = 0;
  std::int64_t release_above = 0;
  if (!arguments("token_digests", given, 4) || !integer(args[1], block) ||
      !integer(args[2], digest_size) || !integer(args[3], release_above)) {
    return nullptr;
  }
  if (block < 1 || digest_size < 1 ||
      digest_size > static_cast<std::int64_t>(Blake2b::kMaxDigest)) {
    PyErr_SetString(PyExc_ValueError,
                    "a block has at least 1 token, a digest 1 to 64 bytes");
    return nullptr;
  }
  std::vector<std::int64_t> tokens;
  if (!read_tokens(args[0], tokens)) return nullptr;
  const std::size_t per_block = static_cast<std::size_t>(block);
  const std::size_t size = static_cast<std::size_t>(digest_size);
  const std::size_t blocks = tokens.size() / per_block;
  std::vector<std::uint8_t> digests(blocks * size);
  const bool release = static_cast<std::int64_t>(tokens.size()) > release_above;
  if (!run(release, [&] {
        Blake2b running(size);
        const auto *bytes = reinterpret_cast<const std::uint8_t *>(tokens.data());
        const std::size_t step = per_block * sizeof(std::int64_t);
        for (std::size_t i = 0; i < blocks; ++i) {
          running.update(bytes + i * step, step);
          running.digest(digests.data() + i * size);
        }
      })) {
    return nullptr;
  }
  return PyBytes_FromStringAndSize(reinterpret_cast<const char *>(digests.data()),
                                   static_cast<Py_ssize_t>(digests.size()));
} catch (const std::bad_alloc &) {
  return PyErr_NoMemory();
}

using FastCall = PyObject *(*)(PyObject *, PyObject *const *, Py_ssize_t);

// Through a type that compilers take as the way to say that the cast is meant.
PyCFunction method(FastCall function) {
  return reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function));
}

PyMethodDef kMethods[] = {
    {"pair_tables", method(pair_tables), METH_FASTCALL, nullptr},
    {"expand", method(expand), METH_FASTCALL, nullptr},
    {"token_digests", method(token_digests), METH_FASTCALL, nullptr},
    {nullptr, nullptr, 0, nullptr}};

int fill_module(PyObject *module) {
  return PyModule_AddIntConstant(module, "INTERFACE", kInterface);
}

PyModuleDef_Slot kSlots[] = {{Py_mod_exec, reinterpret_cast<void *>(fill_module)},
                             {0, nullptr}};

PyModuleDef kModule = {PyModuleDef_HEAD_INIT,
                       "_native",
                       "Work per block and per token that is better not done in Python.",
                       0,
                       kMethods,
                       kSlots,
                       nullptr,
                       nullptr,
                       nullptr};

}  // namespace

PyMODINIT_FUNC PyInit__native() { return PyModuleDef_Init(&kModule); }
