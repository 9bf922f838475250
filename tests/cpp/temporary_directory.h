#pragma once

#include <ftw.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <stdexcept>
#include <string>

/// A directory in TMPDIR that goes with its contents.
class TemporaryDirectory {
 public:
  TemporaryDirectory() {
    const char* parent = std::getenv("TMPDIR");
    path_ = std::string(parent != nullptr ? parent : "/tmp") + "/torch_lms_test_XXXXXX";
    if (mkdtemp(&path_[0]) == nullptr) {
      throw std::runtime_error("expected to make a directory like " + path_);
    }
  }
  ~TemporaryDirectory() {
    const auto remove_one = [](const char* path, const struct stat*, int, struct FTW*) {
      return std::remove(path);
    };
    nftw(path_.c_str(), remove_one, 16, FTW_DEPTH | FTW_PHYS | FTW_MOUNT);
  }
  TemporaryDirectory(const TemporaryDirectory&) = delete;
  TemporaryDirectory& operator=(const TemporaryDirectory&) = delete;

  const std::string& path() const {
    return path_;
  }

 private:
  std::string path_;
};
