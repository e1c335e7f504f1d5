package storagetest

import (
	"fmt"
	"time"

	"github.com/gormoutbox/outbox/engine"
)

var blockedTests = []test{
	{"a failed message holds its group and nothing else", blockedGroup},
	{"an ungrouped failed message holds itself", blockedUngrouped},
	{"total order: a failed message holds the lane", blockedTotal},
	{"no order: a failed message holds itself", blockedNone},
	{"a retry comes before the rest of its group", blockedRetryFirst},
	{"a due retry waits with another of its group", blockedTwoRetries},
	{"more retries than fit a page keep their groups behind them", blockedManyRetries},
	{"a dead message lets its group go on", blockedDead},
	{"a dead message holds its group if asked", blockedHoldDead},
	{"a revived message goes first", blockedRevived},
	{"five thousand blocked messages hide nobody", blockedHuge},
	{"fifty blocked groups hide nobody", blockedMany},
}

// C43
func blockedGroup(f *fixture) {
	id := f.add(message("g", "g1"), message("h", "h1"), message("g", "g2"), message("", "u1"), message("h", "h2"))
	f.fail(time.Hour, id[0])
	page := f.peek(lane, query())
	f.wantTypes(page, "h1", "u1", "h2")
	if page.NextDue <= 0 || page.NextDue > time.Hour {
		f.Errorf("next due in %v, want at most an hour", page.NextDue)
	}
	f.add(message("g", "g3")) // not even a new one gets past it
	f.wantTypes(f.peek(lane, query()), "h1", "u1", "h2")
	f.settle(engine.Settlement{Delivered: []int64{id[0]}})
	f.wantTypes(f.peek(lane, query()), "h1", "g2", "u1", "h2", "g3")
}

func blockedUngrouped(f *fixture) {
	id := f.add(message("", "u1"), message("", "u2"), message("g", "g1"))
	f.fail(time.Hour, id[0])
	f.wantTypes(f.peek(lane, query()), "u2", "g1")
}

func blockedTotal(f *fixture) {
	id := f.add(message("g", "a"), message("h", "b"), message("", "c"))
	f.fail(time.Hour, id[0])
	q := query()
	q.Ordering = engine.Total
	page := f.peek(lane, q)
	f.wantTypes(page)
	if page.NextDue <= 0 || page.NextDue > time.Hour {
		f.Errorf("next due in %v, want at most an hour", page.NextDue)
	}
	f.SetDue(f.T, Orders, id[0], 0)
	if got := types(f.peek(lane, q).Envelopes); len(got) == 0 || got[0] != "a" {
		f.Errorf("fetched %v, want the retry first", got)
	}
	f.settle(engine.Settlement{Delivered: id[:1]})
	f.wantTypes(f.peek(lane, q), "b", "c")
}

func blockedNone(f *fixture) {
	id := f.add(message("g", "a"), message("g", "b"), message("", "c"))
	f.fail(time.Hour, id[0])
	q := query()
	q.Ordering = engine.None
	f.wantTypes(f.peek(lane, q), "b", "c")
}

// C43
func blockedRetryFirst(f *fixture) {
	id := f.add(message("h", "h1"), message("g", "g1"), message("g", "g2"))
	f.fail(time.Hour, id[1])
	f.SetDue(f.T, Orders, id[1], 0)
	page := f.peek(lane, query())
	if page.Envelopes[0].Type != "g1" {
		f.Errorf("fetched %v, want the retry first", types(page.Envelopes))
	}
	if again := drain(f, query()); indexOf(again, "g1") > indexOf(again, "g2") || len(again) != 3 {
		f.Errorf("drained %v, want g1 before g2", again)
	}
}

// blockedTwoRetries has two failed messages in one group, as an outbox leaves
// them whose order was None before.
func blockedTwoRetries(f *fixture) {
	id := f.add(message("g", "g1"), message("g", "g2"), message("", "u1"), message("", "u2"), message("h", "h"))
	f.fail(time.Hour, id[0], id[2])
	f.fail(0, id[1], id[3])
	f.wantTypes(f.peek(lane, query()), "u2", "h")
	q := query()
	q.Ordering = engine.Total
	f.wantTypes(f.peek(lane, q))
	q.Ordering = engine.None
	f.wantTypes(f.peek(lane, q), "g2", "u2", "h")
}

func blockedManyRetries(f *fixture) {
	var failed []int64
	var rows []engine.Row
	for i := range 12 {
		rows = append(rows, message(fmt.Sprint(i), fmt.Sprintf("%d.1", i)), message(fmt.Sprint(i), fmt.Sprintf("%d.2", i)))
	}
	delayed := message("0", "0.3")
	delayed.Delay = time.Hour
	id := f.add(append(rows, delayed)...)
	for i := range 12 {
		failed = append(failed, id[2*i])
	}
	f.fail(time.Hour, failed...)
	f.SetDue(f.T, Orders, id[24], -2*time.Hour)
	for i, id := range failed {
		f.SetDue(f.T, Orders, id, -time.Duration(i)*time.Second)
	}
	got := drain(f, engine.Query{Limit: 5, MaxBytes: 1000})
	wantEqual(f, "first page", got[:min(len(got), 5)], []string{"11.1", "10.1", "9.1", "8.1", "7.1"})
	if len(got) != 25 {
		f.Fatalf("drained %d messages, want 25", len(got))
	}
	for i := range 12 {
		if indexOf(got, fmt.Sprintf("%d.1", i)) > indexOf(got, fmt.Sprintf("%d.2", i)) {
			f.Errorf("group %d came before its retry: %v", i, got)
		}
	}
	if indexOf(got, "0.1") > indexOf(got, "0.3") {
		f.Errorf("a delayed message came before the retry of its group: %v", got)
	}
}

// drain fetches and settles until nothing is ready.
func drain(f *fixture, q engine.Query) (got []string) {
	f.Helper()
	for {
		page := f.peek(lane, q)
		if len(page.Envelopes) == 0 {
			if page.More {
				f.Error("more is set on an empty page")
			}
			return got
		}
		got = append(got, types(page.Envelopes)...)
		f.settle(engine.Settlement{Delivered: ids(page.Envelopes)})
	}
}

func indexOf(list []string, s string) int {
	for i := range list {
		if list[i] == s {
			return i
		}
	}
	return -1
}

// C42
func blockedDead(f *fixture) {
	id := f.add(messages("g", "a", "b")...)
	f.kill(id[0])
	f.wantTypes(f.peek(lane, query()), "b")
}

// C42
func blockedHoldDead(f *fixture) {
	id := f.add(message("g", "g1"), message("g", "g2"), message("h", "h1"), message("", "u1"), message("", "u2"))
	f.kill(id[0], id[3])
	q := query()
	q.HoldDead = true
	f.wantTypes(f.peek(lane, q), "h1", "u2")
	q.Ordering = engine.None
	f.wantTypes(f.peek(lane, q), "g2", "h1", "u2")
	q.Ordering = engine.Total
	f.wantTypes(f.peek(lane, q))
	f.Revive(f.T, Orders, id[0])
	f.Revive(f.T, Orders, id[3])
	q.Ordering = engine.ByGroup
	f.wantTypes(f.peek(lane, q), "g1", "u1", "g2", "h1", "u2")

	// It holds a retry as well, and what is ready beside other retries.
	f.kill(id[0])
	f.settle(engine.Settlement{Delivered: []int64{id[3]}})
	f.fail(0, id[2])
	f.wantTypes(f.peek(lane, q), "h1", "u2")
	f.fail(0, id[1])
	f.wantTypes(f.peek(lane, q), "h1", "u2")
	q.HoldDead = false
	f.wantTypes(f.peek(lane, q), "h1", "g2", "u2")
}

// C47
func blockedRevived(f *fixture) {
	id := f.add(messages("g", "1", "2", "3", "4", "5", "6")...)
	f.kill(id[0], id[1], id[2], id[3])
	retry := f.add(message("h", "retry"))
	f.fail(0, retry[0])
	for _, i := range []int{2, 0, 1} {
		f.Revive(f.T, Orders, id[i])
	}
	page := f.peek(lane, query())
	f.wantTypes(page, "1", "2", "3", "retry", "5", "6")
	if page.Envelopes[0].Attempts != 0 {
		f.Errorf("attempts of a revived message = %d, want 0", page.Envelopes[0].Attempts)
	}
	wantEqual(f, "drained in pages of two", drain(f, engine.Query{Limit: 2, MaxBytes: 1000}), []string{"1", "2", "3", "retry", "5", "6"})
}

// C41
func blockedHuge(f *fixture) {
	rows := make([]engine.Row, 5000)
	for i := range rows {
		rows[i] = message("sick", "sick")
	}
	id := f.add(rows...)
	f.fail(time.Hour, id[0])
	f.add(message("healthy", "healthy"), message("", "ungrouped"))
	page := f.peek(lane, engine.Query{Limit: 10, MaxBytes: 1 << 20})
	f.wantTypes(page, "healthy", "ungrouped")
	if page.More {
		f.Error("more is set, though all the rest is blocked")
	}
	f.SetDue(f.T, Orders, id[0], 0)
	if got := f.peek(lane, query()).Envelopes; len(got) == 0 || got[0].ID != id[0] {
		f.Errorf("fetched %d messages when the retry is due, want it first", len(got))
	}
}

// C41
func blockedMany(f *fixture) {
	var rows []engine.Row
	for i := range 2000 {
		rows = append(rows, message(fmt.Sprint(i%50), "sick"))
	}
	id := f.add(rows...)
	f.fail(time.Hour, id[:50]...)
	f.add(message("healthy", "healthy"))
	f.wantTypes(f.peek(lane, engine.Query{Limit: 10, MaxBytes: 1 << 20}), "healthy")
}
