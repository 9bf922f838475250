// Functions as other extensions have them, which take a tensor's address in one of the ways that
// there are.

#include <algorithm>
#include <atomic>
#include <string>
#include <utility>
#include <vector>

// Not torch/extension.h, which has all of PyTorch compiled.
#include <ATen/DLConvertor.h>
#include <ATen/core/Tensor.h>
#include <ATen/dlpack.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>

namespace {

// --- the ways to an address ---

template <typename Pointer>
struct Way {
  const char* name;
  Pointer (*address_of)(const at::Tensor&);
};

const Way<const float*> kToRead[] = {
    {"const_data_ptr", [](const at::Tensor& t) { return t.const_data_ptr<float>(); }},
    {"data_ptr", [](const at::Tensor& t) -> const float* { return t.data_ptr<float>(); }},
    {"const_void_data_ptr",
     [](const at::Tensor& t) { return static_cast<const float*>(t.const_data_ptr()); }},
    {"storage_data",
     [](const at::Tensor& t) { return static_cast<const float*>(t.storage().data()); }},
};

const Way<float*> kToWrite[] = {
    {"data_ptr", [](const at::Tensor& t) { return t.data_ptr<float>(); }},
    {"void_data_ptr", [](const at::Tensor& t) { return static_cast<float*>(t.data_ptr()); }},
    {"mutable_data_ptr", [](const at::Tensor& t) { return t.mutable_data_ptr<float>(); }},
    {"accessor", [](const at::Tensor& t) { return t.accessor<float, 1>().data(); }},
    {"packed_accessor", [](const at::Tensor& t) { return t.packed_accessor64<float, 1>().data(); }},
    {"storage_mutable_data",
     [](const at::Tensor& t) { return static_cast<float*>(t.storage().mutable_data()); }},
    {"storage_mutable_data_ptr",
     [](const at::Tensor& t) { return static_cast<float*>(t.storage().mutable_data_ptr().get()); }},
    {"view",
     [](const at::Tensor& t) { return t.view({2, -1}).select(0, 0).mutable_data_ptr<float>(); }},
    {"dlpack",
     [](const at::Tensor& t) {
       DLManagedTensor* managed = at::toDLPack(t);
       auto* data = static_cast<float*>(managed->dl_tensor.data);
       managed->deleter(managed);
       return data;
     }},
};

template <typename Ways>
auto way_named(const Ways& ways, const std::string& name) {
  for (const auto& way : ways) {
    if (way.name == name) {
      return way.address_of;
    }
  }
  TORCH_CHECK(false, "expected a way to an address, found ", name, "; see the lists");
}

template <typename Ways>
std::vector<std::string> names_of(const Ways& ways) {
  std::vector<std::string> names;
  for (const auto& way : ways) {
    names.emplace_back(way.name);
  }
  return names;
}

// --- what happens between taking an address and using it ---

/// Allocates, in ops and beside them.
std::vector<at::Tensor> be_busy(const at::Tensor& like, int64_t blocks) {
  std::vector<at::Tensor> made;
  for (int64_t i = 0; i < blocks; ++i) {
    made.push_back(at::full({like.numel()}, static_cast<double>(i), like.options()));
    made.push_back(at::empty({like.numel()}, like.options()));
    made.back().copy_(made.front());
    made.back().add_(made[made.size() - 2]);
  }
  return made;
}

double sum_of(const float* data, int64_t numel) {
  double sum = 0;
  for (int64_t i = 0; i < numel; ++i) {
    sum += data[i];
  }
  return sum;
}

double read_through(const std::string& way, const at::Tensor& tensor, int64_t blocks) {
  const float* data = way_named(kToRead, way)(tensor);
  const auto busy = be_busy(tensor, blocks);
  return sum_of(data, tensor.numel());
}

void write_through(const std::string& way, const at::Tensor& tensor, float value, int64_t blocks) {
  float* data = way_named(kToWrite, way)(tensor);
  const auto busy = be_busy(tensor, blocks);
  std::fill(data, data + tensor.numel(), value);
}

/// Writes, runs an op on the same tensor, and goes on through the same address. Returns what the op
/// has read, and what is read through the address after an op that writes.
std::pair<double, double> write_beside_ops(const at::Tensor& tensor, int64_t blocks) {
  float* data = tensor.mutable_data_ptr<float>();
  std::fill(data, data + tensor.numel(), 1.0F);
  const auto busy = be_busy(tensor, blocks);
  const double seen_by_op = tensor.sum().item<double>();
  at::Tensor alias = tensor;
  alias.add_(1);
  const auto more = be_busy(tensor, blocks);
  const double seen_through_address = sum_of(data, tensor.numel());
  std::fill(data, data + tensor.numel(), 3.0F);
  return {seen_by_op, seen_through_address};
}

/// Takes both addresses first.
void add(const at::Tensor& from, const at::Tensor& to, int64_t blocks) {
  const float* source = from.const_data_ptr<float>();
  float* target = to.mutable_data_ptr<float>();
  const auto busy = be_busy(from, blocks);
  for (int64_t i = 0; i < from.numel(); ++i) {
    target[i] += source[i];
  }
}

/// An autograd Function whose two directions go through addresses.
struct Doubled : torch::autograd::Function<Doubled> {
  static at::Tensor doubled(const at::Tensor& tensor, int64_t blocks) {
    const float* source = tensor.const_data_ptr<float>();
    const auto busy = be_busy(tensor, blocks);
    at::Tensor result = at::empty({tensor.numel()}, tensor.options());
    float* target = result.mutable_data_ptr<float>();
    const auto more = be_busy(tensor, blocks);
    for (int64_t i = 0; i < tensor.numel(); ++i) {
      target[i] = 2 * source[i];
    }
    return result;
  }
  static at::Tensor forward(
      torch::autograd::AutogradContext* context,
      const at::Tensor& tensor,
      int64_t blocks) {
    context->saved_data["blocks"] = blocks;
    return doubled(tensor, blocks);
  }
  static torch::autograd::variable_list backward(
      torch::autograd::AutogradContext* context,
      const torch::autograd::variable_list& gradients) {
    return {
        doubled(gradients[0].contiguous(), context->saved_data["blocks"].toInt()), at::Tensor()};
  }
};

at::Tensor doubled(const at::Tensor& tensor, int64_t blocks) {
  return Doubled::apply(tensor, blocks);
}

// --- functions that call Python while they have an address ---

at::Tensor made_around(int64_t numel, float value, const pybind11::function& call) {
  at::Tensor made = at::empty({numel});
  float* data = made.mutable_data_ptr<float>();
  call();
  std::fill(data, data + numel, value);
  return made;
}

void written_around(const at::Tensor& tensor, float value, const pybind11::function& call) {
  float* data = tensor.mutable_data_ptr<float>();
  call();
  std::fill(data, data + tensor.numel(), value);
}

// --- DLPack's table of functions, as other libraries use it ---

const DLPackExchangeAPI& table_of(const pybind11::object& tensor) {
  const pybind11::object capsule = pybind11::type::of(tensor).attr("__dlpack_c_exchange_api__");
  return *static_cast<const DLPackExchangeAPI*>(
      PyCapsule_GetPointer(capsule.ptr(), "dlpack_exchange_api"));
}

double lent_sum(const pybind11::object& tensor, const pybind11::function& call) {
  DLTensor view{};
  if (table_of(tensor).dltensor_from_py_object_no_sync(tensor.ptr(), &view) != 0) {
    throw pybind11::error_already_set();
  }
  call();
  return sum_of(static_cast<const float*>(view.data), view.shape[0]);
}

double handed_out_sum(const pybind11::object& tensor, const pybind11::function& call) {
  DLManagedTensorVersioned* managed = nullptr;
  if (table_of(tensor).managed_tensor_from_py_object_no_sync(tensor.ptr(), &managed) != 0) {
    throw pybind11::error_already_set();
  }
  call();
  const double sum =
      sum_of(static_cast<const float*>(managed->dl_tensor.data), managed->dl_tensor.shape[0]);
  managed->deleter(managed);
  return sum;
}

// --- an op of a library, with a kernel that goes through addresses ---

void fill_in_op(const at::Tensor& tensor, double value) {
  const auto busy = be_busy(tensor, 2);
  float* data = tensor.mutable_data_ptr<float>();
  std::fill(data, data + tensor.numel(), static_cast<float>(value));
}

std::atomic<int64_t> last_turn{0};

/// Takes and lets go of Python's lock in each turn, as PyTorch's ops do where they copy a tensor.
double sum_in_op(const at::Tensor& tensor, int64_t turns) {
  const float* data = tensor.const_data_ptr<float>();
  double sum = 0;
  for (int64_t turn = 1; turn <= turns; ++turn) {
    sum += sum_of(data, tensor.numel());
    const pybind11::gil_scoped_acquire gil;
    last_turn = turn;
  }
  return sum;
}

} // namespace

TORCH_LIBRARY(torch_lms_foreign, library) {
  library.def("fill(Tensor(a!) tensor, float value) -> ()");
  library.def("sum(Tensor tensor, int turns) -> float");
}

TORCH_LIBRARY_IMPL(torch_lms_foreign, CPU, library) {
  library.impl("fill", &fill_in_op);
  library.impl("sum", &sum_in_op);
}

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  module.attr("to_read") = names_of(kToRead);
  module.attr("to_write") = names_of(kToWrite);
  const auto define = [&module](const char* name, auto function) {
    module.def(name, function);
    const std::string without = std::string(name) + "_without_gil";
    module.def(without.c_str(), function, pybind11::call_guard<pybind11::gil_scoped_release>());
  };
  define("read", &read_through);
  define("write", &write_through);
  define("write_beside_ops", &write_beside_ops);
  define("add", &add);
  define("doubled", &doubled);
  module.def("made_around", &made_around);
  module.def("written_around", &written_around);
  module.def("lent_sum", &lent_sum);
  module.def("handed_out_sum", &handed_out_sum);
  module.def("begin_turns", [] { last_turn = 0; });
  module.def("last_turn", [] { return last_turn.load(); });
}
