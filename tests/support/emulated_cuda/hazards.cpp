#include "hazards.h"

#include <algorithm>

namespace emulated {

void join(Clock& clock, const Clock& other) {
  if (clock.size() < other.size()) clock.resize(other.size());
  for (size_t k = 0; k < other.size(); k++) clock[k] = std::max(clock[k], other[k]);
}

static bool ended(const Clock& clock, int stream, uint64_t at) {
  return (size_t)stream < clock.size() && clock[stream] >= at;
}

Clock& Hazards::clock_of(int stream) {
  if ((size_t)stream >= streams_.size()) streams_.resize(stream + 1);
  auto& clock = streams_[stream];
  if (clock.size() <= (size_t)stream) clock.resize(stream + 1);
  return clock;
}

Clock Hazards::record(int stream) {
  auto& clock = clock_of(stream);
  join(clock, host_);
  return clock;
}

void Hazards::wait(int stream, const Clock& recorded) { join(clock_of(stream), recorded); }

void Hazards::host_saw(const Clock& passed) { join(host_, passed); }

void Hazards::split(uintptr_t at) {
  auto next = pieces_.upper_bound(at);
  if (next == pieces_.begin()) return;
  auto& [begin, piece] = *std::prev(next);
  if (begin == at || piece.end <= at) return;
  pieces_[at] = piece;
  piece.end = at;
}

std::pair<Hazards::Pieces::iterator, Hazards::Pieces::iterator> Hazards::pieces(uintptr_t begin, uintptr_t end) {
  split(begin);
  split(end);
  for (auto at = begin; at < end;) {
    auto next = pieces_.lower_bound(at);
    if (next != pieces_.end() && next->first == at) {
      at = next->second.end;
      continue;
    }
    auto until = next == pieces_.end() ? end : std::min(end, next->first);
    pieces_[at] = Piece{until};
    at = until;
  }
  return {pieces_.lower_bound(begin), pieces_.lower_bound(end)};
}

void Hazards::check(const Use& earlier, const Clock& clock, const Use& use, const char* done, const char* to_what) {
  if (earlier.what == nullptr || earlier.stream == use.stream || ended(clock, earlier.stream, earlier.at)) return;
  report(std::string("HAZARD: ") + use.what + " on stream " + std::to_string(use.stream) + " " + done + " memory that " +
         earlier.what + " on stream " + std::to_string(earlier.stream) + " " + to_what + ", and nothing orders the two");
}

void Hazards::enqueue(int stream, const std::vector<Access>& accesses, const char* what) {
  auto& clock = clock_of(stream);
  join(clock, host_);
  Use use{stream, ++clock[stream], what};
  for (auto& access : accesses) {
    if (access.bytes == 0) continue;
    auto begin = (uintptr_t)access.at;
    auto [first, last] = pieces(begin, begin + access.bytes);
    for (auto each = first; each != last; ++each) {
      auto& piece = each->second;
      check(piece.write, clock, use, access.writes ? "writes" : "reads", "writes");
      if (!access.writes) {
        auto same = [&](const Use& read) { return read.stream == stream; };
        auto found = std::find_if(piece.reads.begin(), piece.reads.end(), same);
        if (found == piece.reads.end()) piece.reads.push_back(use);
        else *found = use;
        continue;
      }
      for (auto& read : piece.reads) check(read, clock, use, "writes", "reads");
    }
    if (access.writes) {
      pieces_.erase(first, last);
      pieces_[begin] = Piece{begin + access.bytes, use, {}};
    }
  }
}

bool Hazards::host_knows_the_end_of(const void* at, size_t bytes) {
  auto [first, last] = pieces((uintptr_t)at, (uintptr_t)at + bytes);
  for (auto each = first; each != last; ++each) {
    const Use& write = each->second.write;
    if (write.what != nullptr && !ended(host_, write.stream, write.at)) return false;
    for (auto& read : each->second.reads)
      if (!ended(host_, read.stream, read.at)) return false;
  }
  return true;
}

void Hazards::forget(const void* at, size_t bytes) {
  auto [first, last] = pieces((uintptr_t)at, (uintptr_t)at + bytes);
  pieces_.erase(first, last);
}

}  // namespace emulated
