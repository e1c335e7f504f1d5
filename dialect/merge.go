package dialect

import (
	"cmp"
	"slices"

	"github.com/gormoutbox/outbox/engine"
)

// isUrgent tells whether a due message goes before everything that is ready:
// a retry, which holds its group, or a dead message that was retried by an
// operator, whose due time is the epoch.
func isUrgent(e *engine.Envelope) bool {
	return e.Attempts > 0 || e.ScheduledAt.UnixMicro() == 0
}

// merge makes a page of what a fetch found: ready messages in the order of
// their ids, and due ones, those with a due time of their own. Each list has at
// most q.Limit messages; a list that is full may go on in the database. Neither
// holds anything that is blocked. Of a group that has a retry nothing but what
// is urgent may be in them, for the retry may be beyond the end of due.
//
// Urgent messages come first, in the order of their due times. The other due
// ones, delayed by their publisher, rank among the ready ones by their due time
// against the time at which those were added, and so count from then on. The
// page ends at q.Limit messages, and before the message with which the payloads
// would exceed q.MaxBytes unless it is the first.
//
// More says that a limit cut something off, or may have.
func merge(due, ready []engine.Envelope, q engine.Query) (page []engine.Envelope, more bool) {
	if len(due) == 0 {
		return cut(ready, q)
	}
	urgent, delayed := splitDue(due)
	more = len(due) >= q.Limit || len(ready) >= q.Limit
	page = make([]engine.Envelope, 0, min(q.Limit, len(due)+len(ready)))
	bytes := 0
	for {
		list := &ready
		switch {
		case len(urgent) > 0:
			list = &urgent
		case len(delayed) > 0 && (len(ready) == 0 || !delayed[0].ScheduledAt.After(ready[0].InsertedAt)):
			list = &delayed
		case len(ready) == 0:
			return page, more
		}
		next := &(*list)[0]
		bytes += len(next.Payload)
		if len(page) == q.Limit || len(page) > 0 && bytes > q.MaxBytes {
			return page, true
		}
		page = append(page, *next)
		*list = (*list)[1:]
	}
}

// cut is merge in the ordinary case of no due messages: the page is a part of
// ready, and nothing is copied.
func cut(ready []engine.Envelope, q engine.Query) (page []engine.Envelope, more bool) {
	bytes := 0
	for i := range ready {
		bytes += len(ready[i].Payload)
		if i == q.Limit || i > 0 && bytes > q.MaxBytes {
			return ready[:i], true
		}
	}
	return ready, len(ready) >= q.Limit
}

// splitDue separates the urgent messages from the delayed ones, both in the
// order of due time and id.
func splitDue(due []engine.Envelope) (urgent, delayed []engine.Envelope) {
	for i := range due {
		if isUrgent(&due[i]) {
			urgent = append(urgent, due[i])
		} else {
			delayed = append(delayed, due[i])
		}
	}
	byDue := func(a, b engine.Envelope) int {
		return cmp.Or(a.ScheduledAt.Compare(b.ScheduledAt), cmp.Compare(a.ID, b.ID))
	}
	slices.SortFunc(urgent, byDue)
	slices.SortFunc(delayed, byDue)
	return urgent, delayed
}
