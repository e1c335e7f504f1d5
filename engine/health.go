package engine

import (
	"slices"
	"time"
)

const (
	// maxOutageDelay bounds the wait between two tries of a destination that
	// is unavailable, whatever the outbox's backoff says: a healed broker is
	// noticed within this time.
	maxOutageDelay = 30 * time.Second
	// narrowAfter is the number of whole batches in a row that fail before a
	// worker looks for a single culprit.
	narrowAfter = 3
	// triesPerWindow bounds the single messages that are tried before the
	// worker concludes that it is an outage and waits.
	triesPerWindow = 3
	// maxSuspects bounds the memory, and the exclusion list, of the search.
	maxSuspects = 32
)

// health is what a worker knows of its destination: whether it is out, and
// whether one message spoils every batch it is in. It lives in memory only:
// an outage writes nothing.
//
// A relay that can only say "it failed" leaves open whether the destination is
// down or one message is poison. After narrowAfter such batches the worker
// goes on with single messages. One that fails alone becomes a suspect and is
// left aside, and the next is tried. If that gets through, the destination is
// up: the suspects are tried again, and who fails now, in the same window, is
// charged. If nobody gets through it is an outage, and nobody is. A window
// ends with a wait.
type health struct {
	batchSize int

	failures int // whole batches that failed in a row
	limit    int // of the next batch
	through  int // messages delivered in this window
	tries    int // single messages that failed in this window
	groups   []string
	ids      []int64
	err      error // the last whole failure
}

func newHealth(batchSize int) *health {
	return &health{batchSize: batchSize, limit: batchSize}
}

// reaction is what a worker does after a batch.
type reaction int

const (
	carryOn reaction = iota // fetch the next batch
	blame                   // charge the batch's only message, then carry on
	hold                    // wait for the destination
)

// after takes in a batch's outcome and says what to do.
func (h *health) after(batch []Envelope, out *outcome) reaction {
	h.err = out.outage
	switch {
	case out.progress():
		h.progress(out.delivered())
		if out.outage != nil {
			return hold
		}
		return carryOn
	case len(batch) == 1 && h.limit == 1 && (h.through > 0 || out.panicked):
		return blame
	case len(batch) == 1 && h.limit == 1:
		return h.suspect(&batch[0])
	}
	h.failures++
	if h.through > 0 || retried(batch) || out.panicked {
		// The destination was up a moment ago, or a known offender is in the
		// batch, or the relay itself broke: look for the culprit at once.
		h.limit = 1
		return carryOn
	}
	if h.failures >= narrowAfter {
		h.limit = 1
	}
	return hold
}

func (h *health) progress(delivered int) {
	h.failures, h.tries = 0, 0
	h.clearSuspects()
	if delivered > 0 {
		h.through += delivered
		h.limit = min(h.limit*2, h.batchSize)
	}
}

func (h *health) suspect(env *Envelope) reaction {
	h.tries++
	if len(h.groups)+len(h.ids) == maxSuspects {
		h.clearSuspects()
	}
	if env.GroupKey != "" {
		h.groups = append(h.groups, env.GroupKey)
	} else {
		h.ids = append(h.ids, env.ID)
	}
	if h.tries < triesPerWindow {
		return carryOn
	}
	h.failures++
	return hold
}

// exhausted is called when nothing but suspects is left to try: there is
// nobody to compare them with.
func (h *health) exhausted() reaction {
	if !h.searching() {
		return carryOn
	}
	h.clearSuspects()
	h.failures++
	return hold
}

// searching reports whether there are suspects.
func (h *health) searching() bool { return len(h.groups)+len(h.ids) > 0 }

func (h *health) clearSuspects() { h.groups, h.ids = nil, nil }

// window begins a new window after a wait.
func (h *health) window() { h.through, h.tries = 0, 0 }

func retried(batch []Envelope) bool {
	return slices.ContainsFunc(batch, func(e Envelope) bool { return e.Attempts > 0 })
}
