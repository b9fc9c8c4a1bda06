// A kernel as a function of Python's on tensors: it reads where they lie through DLPack's exchange API, and compares all else
// that is known of them with what its caller (pagegen/abi.py) has checked. So a call costs hardly more than the kernel.
//
// What is used of Python is in its stable ABI and is found when a Python loads the library: no header of its is needed.
#include <algorithm>
#include <cstring>

#define PG_PYTHON extern "C" __attribute__((weak))
PG_PYTHON char _Py_NoneStruct[];
PG_PYTHON char* PyByteArray_AsString(void* object);
PG_PYTHON void* PyLong_FromLong(long value);
PG_PYTHON void PyErr_Clear(void);
PG_PYTHON void* PyEval_SaveThread(void);
PG_PYTHON void PyEval_RestoreThread(void* thread);

namespace python {
constexpr int MAX_TENSORS = 16, MAX_DIMS = 5;
constexpr int32_t OTHER_TENSORS = -1;  // beside PG_OK and PG_E_*: nothing has run, the call has to be checked

struct DLTensor {  // of DLPack 1
  void* data;
  int32_t device_type, device_id, dims;
  uint8_t code, bits;
  uint16_t lanes;
  int64_t *shape, *strides;
  uint64_t byte_offset;
};

struct Kind {  // what a tensor is like wherever it lies; zeros for None
  int64_t dtype, device, dims, in_previous, shape[MAX_DIMS], strides[MAX_DIMS];
};

enum State : int64_t { NEW, KNOWN, UNREADABLE };

struct Call {  // and behind it the args of the kernel
  int32_t (*dl_tensor)(void* object, DLTensor* tensor);  // DLPack's dltensor_from_py_object_no_sync; null if torch has none
  State state;
  int64_t count;                // of tensors; those at the end that a call leaves out are None
  int64_t fields[MAX_TENSORS];  // where in the args their addresses stand
  Kind kinds[MAX_TENSORS];
};

// Whether a tensor, or None, could be read. `address` is the previous tensor's before, its own after.
inline bool read(const Call& call, void* object, const char*& address, Kind& kind) {
  const char* previous = address;
  address = nullptr;
  kind = {};
  if (object == _Py_NoneStruct) return true;
  DLTensor tensor;
  if (!call.dl_tensor) return false;
  if (call.dl_tensor(object, &tensor)) return PyErr_Clear(), false;
  if (tensor.dims > MAX_DIMS) return false;
  if (!tensor.data && std::find(tensor.shape, tensor.shape + tensor.dims, 0) == tensor.shape + tensor.dims) return false;  // has lost its memory
  address = static_cast<char*>(tensor.data) + tensor.byte_offset;
  kind.dtype = tensor.code | tensor.bits << 8 | tensor.lanes << 16;
  kind.device = int64_t(tensor.device_type) << 32 | uint32_t(tensor.device_id);
  kind.dims = 1 + tensor.dims;
  kind.in_previous = address == previous;  // V that lies in K: it has to, whichever K it is
  std::copy_n(tensor.shape, tensor.dims, kind.shape);
  std::copy_n(tensor.strides, tensor.dims, kind.strides);
  return true;
}

// `self` is a bytearray with a Call and its args, which were packed for these very tensors. The first time the kernel runs on
// them and their kinds are kept; later it runs on any of the same kinds, which need no other check.
template <class Args>
void* call(void* self, void* const* tensors, intptr_t count, int32_t (*kernel)(const Args*)) {
  Call& c = *reinterpret_cast<Call*>(PyByteArray_AsString(self));
  char* args = reinterpret_cast<char*>(&c + 1);
  bool known = c.state != UNREADABLE && count <= c.count;
  const char* address = nullptr;
  for (intptr_t i = 0; known && i < c.count; ++i) {
    Kind kind;
    known = read(c, i < count ? tensors[i] : _Py_NoneStruct, address, kind);
    if (c.state == NEW) c.kinds[i] = kind;
    known = known && !std::memcmp(&kind, &c.kinds[i], sizeof kind);
    if (known) std::memcpy(args + c.fields[i], &address, sizeof address);
  }
  if (!known && c.state != NEW) return PyLong_FromLong(OTHER_TENSORS);
  c.state = known ? KNOWN : UNREADABLE;
  void* thread = PyEval_SaveThread();
  const int32_t status = kernel(reinterpret_cast<const Args*>(args));
  PyEval_RestoreThread(thread);
  return PyLong_FromLong(status);
}
}  // namespace python
