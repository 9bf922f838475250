#pragma once

#include <extension/access/Chaos.h>
#include <extension/access/EntityLookup.h>
#include <extension/access/GivenAddresses.h>
#include <extension/access/ManualPaging.h>
#include <extension/access/Observer.h>
#include <extension/access/OpCallbacks.h>
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
  EntityLookup lookup{pager, policy};
  GivenAddresses addresses{pager, policy, recipes, planning, lookup};
  Observer observer{pager, policy, recipes, planning, chaos, addresses, lookup};
  OpCallbacks callbacks{pager, recipes, &Observer::on_begin, &Observer::on_end};
  ManualPaging manual{pager, callbacks, addresses};

  /// Begins automatic mode for a device, or changes its limit. Waits for ops that began unseen,
  /// before anything moves: see `OpCallbacks::Request`.
  void enable(Device& device, size_t limit_bytes, size_t min_bytes);
  /// Ends automatic mode: waits, pages everything in, and rethrows what failed on the way.
  void disable();

 private:
  Runtime();
};

} // namespace torch_lms
