package engine

import (
	"context"
	"fmt"
	"strconv"
)

// PushState says how wake-ups from other nodes reach this one.
type PushState int

const (
	// Polling: there is no push; the poll finds everything.
	Polling PushState = iota
	// Degraded: there should be push, but it does not work at the moment. The
	// poll runs as quickly as without it.
	Degraded
	// Push: wake-ups arrive, proven lately; the poll runs slowly.
	Push
)

// String gives "polling", "degraded" or "push".
func (s PushState) String() string {
	switch s {
	case Push:
		return "push"
	case Degraded:
		return "degraded"
	}
	return "polling"
}

// Waker brings hints that messages may be ready. The engine works without any
// of them, one poll interval later.
type Waker interface {
	// Listen calls wake for each hint until ctx ends, then returns ctx's
	// error. After every gap, the beginning included, it calls wake for
	// everything (Wake{All: true} without an outbox). wake does not block.
	Listen(ctx context.Context, wake func(Wake)) error
	// State says whether hints get through at the moment. It is safe for
	// concurrent use and does not block.
	State() PushState
}

// EncodeWake gives the notification payload of a wake: a hint of constant
// size, whatever the names, keys and messages are.
func EncodeWake(w Wake) string {
	if w.All {
		return fmt.Sprintf("%016x%016s", GroupHash(w.Outbox), "*")
	}
	return fmt.Sprintf("%016x%016x", GroupHash(w.Outbox), w.Hash)
}

// DecodeWake reads a payload of EncodeWake that concerns one of the given
// outboxes. ok is false for those of other outboxes and for anything else.
func DecodeWake(payload string, outboxes []string) (w Wake, ok bool) {
	if len(payload) != 32 {
		return Wake{}, false
	}
	name, err := strconv.ParseUint(payload[:16], 16, 64)
	if err != nil {
		return Wake{}, false
	}
	for _, o := range outboxes {
		if GroupHash(o) != name {
			continue
		}
		if payload[31] == '*' {
			return Wake{Outbox: o, All: true}, true
		}
		h, err := strconv.ParseUint(payload[16:], 16, 64)
		return Wake{Outbox: o, Hash: h}, err == nil
	}
	return Wake{}, false
}
