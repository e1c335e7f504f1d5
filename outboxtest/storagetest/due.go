package storagetest

import (
	"fmt"
	"time"

	"github.com/gormoutbox/outbox/engine"
)

var dueTests = []test{
	{"a delayed message waits for its time", dueWaits},
	{"a delayed message does not hold its group", dueHoldsNobody},
	{"a delayed message ranks by its due time", dueRanks},
	{"due messages end a page like others", dueLimits},
	{"a delayed message waits behind its group's failed one", dueBlocked},
	{"the next due message is announced", dueNext},
	{"a retry is due since its message was", dueSince},
	{"total order counts a delayed message from its due time", dueTotal},
}

func delayed(group, typ string, by time.Duration) engine.Row {
	row := message(group, typ)
	row.Delay = by
	return row
}

func dueWaits(f *fixture) {
	id := f.add(delayed("g", "later", time.Hour))
	f.wantTypes(f.peek(lane, query()))
	f.SetDue(f.T, Orders, id[0], -time.Millisecond)
	page := f.peek(lane, query())
	f.wantTypes(page, "later")
	if !page.Envelopes[0].ScheduledAt.Before(page.Now) {
		f.Errorf("due at %v, fetched at %v", page.Envelopes[0].ScheduledAt, page.Now)
	}
}

// dueSince follows the instant from which GiveUpAfter counts.
func dueSince(f *fixture) {
	id := f.add(message("g", "at once"), delayed("h", "later", time.Hour))
	f.SetDue(f.T, Orders, id[1], -time.Minute)
	before := f.peek(lane, query()).Envelopes
	if len(before) != 2 {
		f.Fatalf("fetched %v, want both", types(before))
	}
	want := make(map[int64]time.Time)
	for _, e := range before {
		if !e.DueAt.Equal(e.ScheduledAt) {
			f.Errorf("%s is due since %v, scheduled at %v", e.Type, e.DueAt, e.ScheduledAt)
		}
		want[e.ID] = e.DueAt
	}
	for attempts := range 2 { // its retries' own times do not count
		var s engine.Settlement
		for _, id := range id {
			s.Failed = append(s.Failed, engine.Failure{ID: id, Attempts: attempts, Error: "refused"})
		}
		f.settle(s)
		for _, e := range f.peek(lane, query()).Envelopes {
			if !e.DueAt.Equal(want[e.ID]) {
				f.Errorf("%s is due since %v after a failure, want %v", e.Type, e.DueAt, want[e.ID])
			}
		}
	}
}

// C43
func dueHoldsNobody(f *fixture) {
	f.add(delayed("g", "later", time.Hour), message("g", "at once"))
	f.wantTypes(f.peek(lane, query()), "at once")
	f.wantTypes(f.peek(lane, engine.Query{Limit: 10, MaxBytes: 100, Ordering: engine.Total}), "at once")
}

func dueRanks(f *fixture) {
	id := f.add(delayed("g", "second", time.Hour), delayed("g", "zeroth", time.Hour))
	f.add(message("g", "first"))
	f.SetDue(f.T, Orders, id[0], 0)
	f.SetDue(f.T, Orders, id[1], -time.Hour)
	f.add(message("g", "third"))
	f.wantTypes(f.peek(lane, query()), "zeroth", "first", "second", "third")
	wantEqual(f, "drained one by one", drain(f, engine.Query{Limit: 1, MaxBytes: 100}), []string{"zeroth", "first", "second", "third"})
}

func dueLimits(f *fixture) {
	for i := range 4 {
		id := f.add(delayed("", fmt.Sprint(i), time.Hour))
		f.SetDue(f.T, Orders, id[0], -time.Duration(10-i)*time.Minute)
	}
	page := f.peek(lane, engine.Query{Limit: 3, MaxBytes: 100})
	f.wantTypes(page, "0", "1", "2")
	if !page.More {
		f.Error("more is not set on a page that ended at its limit")
	}
	page = f.peek(lane, engine.Query{Limit: 10, MaxBytes: 2})
	f.wantTypes(page, "0", "1")
	if !page.More {
		f.Error("more is not set on a page that ended at its bytes")
	}
}

func dueBlocked(f *fixture) {
	id := f.add(message("g", "failed"), delayed("g", "later", time.Hour))
	f.SetDue(f.T, Orders, id[1], -time.Minute)
	f.fail(time.Hour, id[0])
	f.wantTypes(f.peek(lane, query()))
	f.SetDue(f.T, Orders, id[0], 0)
	wantEqual(f, "drained", drain(f, query()), []string{"failed", "later"})
}

func dueNext(f *fixture) {
	f.add(delayed("g", "b", 3*time.Hour))
	f.add(delayed("g", "a", 2*time.Hour))
	f.add(message("g", "now"))
	page := f.peek(lane, query())
	if page.NextDue <= time.Hour || page.NextDue > 2*time.Hour {
		f.Errorf("next due in %v, want two hours", page.NextDue)
	}
}

func dueTotal(f *fixture) {
	id := f.add(delayed("g", "second", time.Hour))
	f.add(message("h", "first"))
	f.SetDue(f.T, Orders, id[0], 0)
	f.add(message("", "third"))
	f.wantTypes(f.peek(lane, engine.Query{Limit: 10, MaxBytes: 100, Ordering: engine.Total}), "first", "second", "third")
}
