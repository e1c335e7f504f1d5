package engine

import "hash/fnv"

// Ordering is the order that an outbox keeps.
type Ordering int

const (
	// ByGroup delivers the messages of a group in commit order. Messages
	// without a group promise no order. This is the default.
	ByGroup Ordering = iota
	// Total delivers the whole outbox in commit order, as if all its messages
	// were of one group. It needs exactly one partition.
	Total
	// None promises no order: a failed message holds nobody.
	None
)

// String gives the name that the database records.
func (o Ordering) String() string {
	switch o {
	case ByGroup:
		return "by_group"
	case Total:
		return "total"
	case None:
		return "none"
	}
	return "unknown"
}

// GroupHash maps a group key to the number that decides its partition: hash
// modulo the partition count. It is 64-bit FNV-1a with the finalizer of
// MurmurHash3 over it, because FNV's low bits alone spread short keys badly.
// The result has 63 bits, so that a database's signed integer holds it. It is
// part of the stored format: golden values in a test pin it.
func GroupHash(key string) uint64 {
	h := fnv.New64a()
	_, _ = h.Write([]byte(key))
	x := h.Sum64()
	x ^= x >> 33
	x *= 0xff51afd7ed558ccd
	x ^= x >> 33
	x *= 0xc4ceb9fe1a85ec53
	x ^= x >> 33
	return x >> 1
}

// Partition is the partition of a hash among n.
func Partition(hash uint64, n int) int {
	return int(hash % uint64(n))
}
