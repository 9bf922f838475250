#pragma once

#include <cstddef>

#include <entity/CudaEntityTransferQueue.h>

#include <extension/base/Stats.h>
#include <extension/transfer/ActionTimes.h>
#include <extension/transfer/Arrivals.h>
#include <extension/transfer/EntityTable.h>
#include <extension/transfer/KeptCopies.h>
#include <extension/transfer/Whereabouts.h>

namespace torch_lms {

/// What the parts of the pager have in common. Each says what it may be used for.
struct PagerState {
  explicit PagerState(void (*begin_worker)())
      : out(TransferDirection::kOut, size_t{1} << 30, begin_worker),
        in(TransferDirection::kIn, size_t{1} << 30, begin_worker) {}

  EntityTable table;
  CudaEntityTransferQueue out;
  CudaEntityTransferQueue in;
  Stats stats;
  ActionTimes action_times; ///< What moving takes of the threads that ask for it.
  Arrivals arrivals;
  KeptCopies kept{table};
  Whereabouts whereabouts{stats, arrivals, kept};
};

} // namespace torch_lms
