#pragma once

#include <extension/access/Chaos.h>
#include <extension/access/ManualPaging.h>
#include <extension/access/Observer.h>
#include <extension/access/Planning.h>
#include <extension/access/Recipes.h>
#include <extension/memory/Devices.h>
#include <extension/policy/Policy.h>
#include <extension/transfer/Pager.h>

namespace torch_lms {

/// The parts, put together: the one object of the process, made on first use, never destroyed.
/// Only what PyTorch and Python call without a context of ours (the module's functions) asks for
/// it; the parts are given what they use.
struct Runtime {
  static Runtime& get();

  Devices devices;
  Pager pager{devices};
  Recipes recipes{pager};
  Chaos chaos{pager, recipes};
  Policy policy{pager};
  Planning planning{pager, policy, recipes};
  Observer observer{pager, policy, recipes, planning, chaos};
  ManualPaging manual{pager, observer};

  /// Ends automatic mode: waits, pages everything in, and rethrows what failed on the way.
  void disable();

 private:
  Runtime();
};

} // namespace torch_lms
