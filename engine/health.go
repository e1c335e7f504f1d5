package engine

import (
	"slices"
	"time"
)

const (
	// The wait between two tries of a destination that is unavailable is the
	// outbox's backoff within these bounds: a destination is not stormed, and
	// its recovery is noticed soon.
	minOutageDelay = 100 * time.Millisecond
	maxOutageDelay = 30 * time.Second
	// narrowAfter is the number of whole batches in a row that fail before a
	// worker looks for a single culprit.
	narrowAfter = 3
	// triesPerWindow bounds the single messages that are tried before the
	// worker concludes that it is an outage and waits.
	triesPerWindow = 3
	// maxSuspects bounds the memory, and the exclusion list, of the search.
	maxSuspects = 100
)

// health is what a worker knows of its destination: whether it is out, and
// whether one message spoils every batch it is in. It lives in memory only:
// an outage writes nothing.
//
// A relay that says of a whole batch that it failed leaves open whether the
// destination is down or one message is poison. When the destination was up a
// moment ago, or after narrowAfter such batches, the worker goes on with single
// messages. One that fails alone becomes a suspect and is left aside, and the
// next is tried. If that gets through, the destination is up: one suspect is
// accused and tried again, and if it fails now, right after another got
// through, it is charged. Each charge takes a success of its own, so that an
// outage that begins just then is charged to one message at most. If the
// accused gets through, the others are cleared as well. If nobody gets through
// it is an outage, and nobody is charged.
//
// A window ends with a wait, and takes its evidence along: only what happened
// within one is compared. In a total order nobody may go ahead of a suspect,
// so there is nobody to compare it with, and it is an outage.
type health struct {
	ordering  Ordering
	batchSize int

	failures int   // how often in a row nothing got through: the length of the wait
	limit    int   // of the next batch
	up       bool  // the last batch got through, in this window
	tries    int   // single messages that failed in this window
	err      error // the last whole failure
	suspects aside // failed alone; not fetched
	accused  aside // one that is tried again; empty: none
}

func newHealth(c *OutboxConfig) *health {
	return &health{ordering: c.Ordering, batchSize: c.BatchSize, limit: c.BatchSize}
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
	if out.progress() {
		h.progress(batch, out.delivered())
		if out.outage == nil {
			return carryOn
		}
		h.err = out.outage
		return hold
	}
	wasUp := h.up
	h.up, h.err = false, out.outage
	switch {
	case !out.sweeping:
		h.failures++
		return hold
	case len(batch) == 1:
		return h.alone(&batch[0], wasUp, out.panicked)
	}
	h.failures++
	// The destination was up a moment ago, or a known offender is in the
	// batch, or the relay itself broke: look for the culprit at once.
	search := wasUp || out.panicked || h.limit > 1 && slices.ContainsFunc(batch, retried)
	if search || h.failures >= narrowAfter {
		h.limit = 1
	}
	if search {
		return carryOn
	}
	return hold
}

// progress takes in that something became of the batch.
func (h *health) progress(batch []Envelope, delivered int) {
	h.failures, h.tries = 0, 0
	if delivered == 0 {
		return
	}
	h.up = true
	switch {
	case len(batch) == 1 && h.accused.has(&batch[0]):
		h.suspects, h.accused = aside{}, aside{}
	case h.searching():
		h.accused = h.suspects.take()
	default:
		h.limit = min(h.limit*2, h.batchSize)
	}
}

// alone takes in that a message failed in a batch of its own.
func (h *health) alone(env *Envelope, wasUp, panicked bool) reaction {
	h.limit = 1
	switch {
	case panicked, wasUp && h.accused.has(env):
		h.accused = aside{}
		return blame
	case h.ordering == Total:
		h.failures++
		return hold
	}
	if h.suspects.len() == maxSuspects {
		h.suspects = aside{}
	}
	h.suspects.add(env, h.ordering)
	if h.tries++; h.tries < triesPerWindow {
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
	h.suspects = aside{}
	h.failures++
	return hold
}

// searching reports whether there are suspects.
func (h *health) searching() bool { return h.suspects.len() > 0 }

// window begins a new window after a wait.
func (h *health) window() {
	h.up, h.tries, h.accused = false, 0, aside{}
}

func retried(e Envelope) bool { return e.Attempts > 0 }

// aside is a set of messages that stand for themselves or, where their group
// must not go on without them, for their group.
type aside struct {
	groups []string
	ids    []int64
}

func (a *aside) add(env *Envelope, o Ordering) {
	if env.GroupKey != "" && o == ByGroup {
		a.groups = append(a.groups, env.GroupKey)
		return
	}
	a.ids = append(a.ids, env.ID)
}

// take removes one from the set, and returns it as a set.
func (a *aside) take() (one aside) {
	if len(a.groups) > 0 {
		one.groups, a.groups = a.groups[:1], a.groups[1:]
	} else {
		one.ids, a.ids = a.ids[:1], a.ids[1:]
	}
	return one
}

func (a *aside) has(env *Envelope) bool {
	return slices.Contains(a.ids, env.ID) || env.GroupKey != "" && slices.Contains(a.groups, env.GroupKey)
}

func (a *aside) len() int { return len(a.groups) + len(a.ids) }
