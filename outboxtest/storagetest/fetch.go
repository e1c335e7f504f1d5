package storagetest

import (
	"fmt"
	"time"

	"github.com/gormoutbox/outbox/engine"
)

var fetchTests = []test{
	{"messages come in id order", fetchOrder},
	{"the limit ends a page", fetchLimit},
	{"the payload bytes end a page", fetchBytes},
	{"a message larger than the bound comes alone", fetchLarge},
	{"skipped messages and groups are left out", fetchSkips},
	{"an empty lane", fetchEmpty},
	{"the clock is the database's", fetchClock},
	{"a redelivery is the same message", fetchIdentity},
	{"a paused outbox gives nothing", fetchPaused},
	{"a lane whose count is not in force gives nothing", fetchMoved},
}

func fetchOrder(f *fixture) {
	var want []string
	for i := range 40 {
		want = append(want, fmt.Sprint(i))
		f.add(message([]string{"g", "h", ""}[i%3], want[i]))
	}
	page := f.peek(lane, query())
	f.wantTypes(page, want...)
	if page.More {
		f.Error("more is set on a page that holds everything")
	}
}

func fetchLimit(f *fixture) {
	f.add(messages("g", "a", "b", "c")...)
	for limit, want := range [][]string{1: {"a"}, 2: {"a", "b"}} {
		if limit == 0 {
			continue
		}
		page := f.peek(lane, engine.Query{Limit: limit, MaxBytes: 1000})
		f.wantTypes(page, want...)
		if !page.More {
			f.Errorf("more is not set on a page that ended at its limit of %d", limit)
		}
	}
}

func fetchBytes(f *fixture) {
	for i := range 6 {
		row := message("g", fmt.Sprint(i))
		row.Payload = make([]byte, 100)
		f.add(row)
	}
	for _, test := range []struct {
		maxBytes int
		want     []string
	}{
		{250, []string{"0", "1"}},
		{300, []string{"0", "1", "2"}},
		{599, []string{"0", "1", "2", "3", "4"}},
		{600, []string{"0", "1", "2", "3", "4", "5"}},
	} {
		page := f.peek(lane, engine.Query{Limit: 100, MaxBytes: test.maxBytes})
		f.wantTypes(page, test.want...)
		if page.More != (test.maxBytes < 600) {
			f.Errorf("more = %v at %d of 600 bytes", page.More, test.maxBytes)
		}
	}
}

func fetchLarge(f *fixture) {
	large := message("g", "large")
	large.Payload = make([]byte, 1<<20)
	f.add(large, message("g", "small"))
	page := f.peek(lane, engine.Query{Limit: 100, MaxBytes: 1000})
	f.wantTypes(page, "large")
	if !page.More {
		f.Error("more is not set")
	}
	f.settle(engine.Settlement{Delivered: ids(page.Envelopes)})
	f.wantTypes(f.peek(lane, engine.Query{Limit: 100, MaxBytes: 1000}), "small")
}

func fetchSkips(f *fixture) {
	id := f.add(message("g", "g1"), message("h", "h1"), message("", "u1"), message("g", "g2"), message("h", "h2"), message("", "u2"))
	q := query()
	q.SkipGroups = []string{"g", "no such group"}
	f.wantTypes(f.peek(lane, q), "h1", "u1", "h2", "u2")
	q.SkipIDs = []int64{id[2], id[4], id[5] + 1000}
	f.wantTypes(f.peek(lane, q), "h1", "u2")
	q.SkipGroups = nil
	f.wantTypes(f.peek(lane, q), "g1", "h1", "g2", "u2")

	// Skipping holds for retries and other due messages too.
	f.fail(0, id[0], id[2])
	f.SetDue(f.T, Orders, id[1], -time.Minute)
	q.SkipGroups = []string{"g", "h"}
	f.wantTypes(f.peek(lane, q), "u2")
	f.wantTypes(f.peek(lane, engine.Query{Limit: 1, MaxBytes: 1000, SkipIDs: []int64{id[0], id[2]}}), "h1")
}

func fetchEmpty(f *fixture) {
	page := f.peek(lane, query())
	f.wantTypes(page)
	if page.More || page.NextDue >= 0 {
		f.Errorf("more = %v, next due in %v, want neither", page.More, page.NextDue)
	}
}

func fetchClock(f *fixture) {
	before := f.peek(lane, query()).Now
	f.add(message("g", "a"))
	page := f.peek(lane, query())
	inserted := page.Envelopes[0].InsertedAt
	if inserted.Before(before) || page.Now.Before(inserted) {
		f.Errorf("added at %v, between fetches at %v and %v", inserted, before, page.Now)
	}
}

func fetchIdentity(f *fixture) {
	row := message("g", "a")
	row.Headers = map[string]string{"k": "v"}
	id := f.add(row)[0]
	first := f.peek(lane, query()).Envelopes[0]
	if first.ID != id || first.Installation == "" || first.Outbox != Orders || first.GroupKey != "g" ||
		first.Attempts != 0 || first.LastError != "" {
		f.Errorf("envelope = %+v", first)
	}
	f.fail(0, id)
	second := f.peek(lane, query()).Envelopes[0]
	if first.DedupID() != second.DedupID() {
		f.Errorf("dedup id = %q, then %q", first.DedupID(), second.DedupID())
	}
	if second.Attempts != 1 || second.LastError != "refused" {
		f.Errorf("attempts = %d, last error = %q after one refusal", second.Attempts, second.LastError)
	}
	second.Attempts, second.LastError, second.ScheduledAt = 0, "", first.ScheduledAt
	wantEnvelope(f, second, first)
}

func fetchPaused(f *fixture) {
	f.add(message("g", "a"))
	f.SetPaused(f.T, Orders, true)
	f.wantState(f.peek(lane, query()), engine.PagePaused)
	f.SetPaused(f.T, Orders, false)
	f.wantTypes(f.peek(lane, query()), "a")
}

func fetchMoved(f *fixture) {
	f.add(message("g", "a"))
	f.SetPartitions(f.T, Orders, 2)
	f.wantState(f.peek(lane, query()), engine.PageMoved)
	f.SetPartitions(f.T, Orders, 1)
	f.wantTypes(f.peek(lane, query()), "a")
}
