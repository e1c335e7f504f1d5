package listener

import (
	"slices"
	"sync"

	"github.com/gormoutbox/outbox/engine"
)

// Hub tells the engines of this process about commits of this process. The
// zero value is ready, and sends nothing to other processes. All methods are
// safe for concurrent use.
type Hub struct {
	sender *Sender

	mu       sync.RWMutex // held for reading while an engine is woken
	attached []*attachment
}

type attachment struct {
	outboxes []string
	wake     func(engine.Wake)
}

// NewHub returns a hub that hands the wakes which no engine of this process
// takes to sender. A nil sender drops them: there is nobody else to tell, or
// they were sent another way.
func NewHub(sender *Sender) *Hub {
	return &Hub{sender: sender}
}

// Attach has wake called for each commit that adds to one of the outboxes,
// until detach is called. wake must not block, nor call the hub. It is not
// called after detach has returned. Several engines may be attached, also for
// the same outbox: each is called.
func (h *Hub) Attach(outboxes []string, wake func(engine.Wake)) (detach func()) {
	a := &attachment{outboxes: slices.Clone(outboxes), wake: wake}
	h.mu.Lock()
	defer h.mu.Unlock()
	h.attached = append(h.attached, a)
	return func() {
		h.mu.Lock()
		defer h.mu.Unlock()
		h.attached = slices.DeleteFunc(h.attached, func(other *attachment) bool { return other == a })
	}
}

// Committed passes on what a transaction has added, after its commit. Each
// wake names its outbox. It neither blocks nor fails, so that it can be called
// on the goroutine that committed.
func (h *Hub) Committed(wakes []engine.Wake) {
	var elsewhere []engine.Wake
	for _, w := range wakes {
		if !h.wake(w) {
			elsewhere = append(elsewhere, w)
		}
	}
	if h.sender != nil && len(elsewhere) > 0 {
		h.sender.Send(elsewhere)
	}
}

// wake reports whether an attached engine relays the outbox.
func (h *Hub) wake(w engine.Wake) bool {
	h.mu.RLock()
	defer h.mu.RUnlock()
	found := false
	for _, a := range h.attached {
		if slices.Contains(a.outboxes, w.Outbox) {
			a.wake(w)
			found = true
		}
	}
	return found
}
