package storagetest

import (
	"context"
	"fmt"
	"strings"
	"time"

	"github.com/gormoutbox/outbox/engine"
)

var settleTests = []test{
	{"a delivered message is gone", settleDelivered},
	{"a kept message is not delivered again", settleKept},
	{"a failure is charged once", settleFailed},
	{"a failure of another attempt is ignored", settleGuarded},
	{"a dead message is not delivered", settleDead},
	{"a mixed settlement is applied as one", settleMixed},
	{"what is not there is ignored", settleUnknown},
	{"a message of another outbox is left alone", settleForeign},
	{"three thousand messages", settleMany},
	{"a retry waits as long as it was told", settleDelay},
	{"a long error text", settleError},
	{"an empty settlement", settleNothing},
}

func settleDelivered(f *fixture) {
	id := f.add(messages("g", "a", "b", "c")...)
	for range 2 { // twice is the same as once
		f.settle(engine.Settlement{Delivered: []int64{id[0], id[2]}})
		f.wantTypes(f.peek(lane, query()), "b")
	}
	f.wantKept(0, 0)
}

// wantKept checks how many delivered and dead messages Orders has, and deletes
// them.
func (f *fixture) wantKept(delivered, dead int) {
	f.Helper()
	for _, q := range []struct {
		what  string
		query engine.PruneQuery
		want  int
	}{
		{"delivered", engine.PruneQuery{Outbox: Orders, Delivered: 0, Dead: -1, Limit: 10_000}, delivered},
		{"dead", engine.PruneQuery{Outbox: Orders, Delivered: -1, Dead: 0, Limit: 10_000}, dead},
	} {
		got, err := f.Storage.Prune(f.ctx, q.query)
		f.must("prune", err)
		if got != q.want {
			f.Errorf("%d messages are %s, want %d", got, q.what, q.want)
		}
	}
}

func settleKept(f *fixture) {
	id := f.add(messages("g", "a", "b", "c")...)
	f.fail(0, id[1])
	for range 2 {
		f.settle(engine.Settlement{Delivered: id[:2], Keep: true})
		f.wantTypes(f.peek(lane, query()), "c")
	}
	f.wantKept(2, 0)
}

func settleFailed(f *fixture) {
	id := f.add(messages("g", "a", "b")...)
	for range 2 {
		f.settle(engine.Settlement{Failed: []engine.Failure{{ID: id[0], Error: "refused", Delay: -time.Second}}})
	}
	page := f.peek(lane, query())
	if e := page.Envelopes[0]; e.ID != id[0] || e.Attempts != 1 || e.LastError != "refused" {
		f.Errorf("after one failure: id %d, attempts %d, error %q", e.ID, e.Attempts, e.LastError)
	}
	f.settle(engine.Settlement{Failed: []engine.Failure{{ID: id[0], Attempts: 1, Error: "again"}}})
	if e := f.peek(lane, query()).Envelopes[0]; e.Attempts != 2 || e.LastError != "again" {
		f.Errorf("after the second: attempts %d, error %q", e.Attempts, e.LastError)
	}
}

func settleGuarded(f *fixture) {
	id := f.add(messages("g", "a")...)
	f.fail(0, id[0])
	for _, attempts := range []int{0, 2} {
		stale := []engine.Failure{{ID: id[0], Attempts: attempts, Error: "stale", Delay: time.Hour}}
		f.settle(engine.Settlement{Failed: stale})
		f.settle(engine.Settlement{Dead: stale})
	}
	if e := f.peek(lane, query()).Envelopes[0]; e.Attempts != 1 || e.LastError != "refused" {
		f.Errorf("attempts %d, error %q, want what the first failure left", e.Attempts, e.LastError)
	}
	f.wantKept(0, 0)
}

func settleDead(f *fixture) {
	id := f.add(messages("g", "a", "b")...)
	f.fail(time.Hour, id[0])
	for range 2 {
		f.settle(engine.Settlement{Dead: []engine.Failure{{ID: id[0], Attempts: 1, Error: "hopeless"}}})
		f.wantTypes(f.peek(lane, query()), "b")
	}
	f.settle(engine.Settlement{Failed: []engine.Failure{{ID: id[0], Attempts: 2}}})
	f.Revive(f.T, Orders, id[0])
	if e := f.peek(lane, query()).Envelopes[0]; e.ID != id[0] || e.LastError != "hopeless" {
		f.Errorf("revived: id %d, error %q", e.ID, e.LastError)
	}
	f.kill(id[0])
	f.wantKept(0, 1)
}

// C42
func settleMixed(f *fixture) {
	id := f.add(message("a", "a1"), message("b", "b1"), message("a", "a2"), message("b", "b2"), message("c", "c1"), message("d", "d1"))
	err := f.claim(lane, func(_ context.Context, c engine.Claim, _ engine.Page) error {
		c.Settle(engine.Settlement{
			Keep:      true,
			Delivered: []int64{id[1], id[3], id[4]},
			Failed:    []engine.Failure{{ID: id[0], Delay: time.Hour, Error: "refused"}},
			Dead:      []engine.Failure{{ID: id[5], Error: "hopeless"}},
		})
		return nil
	})
	f.must("claim", err)
	f.wantTypes(f.peek(lane, query()))
	f.SetDue(f.T, Orders, id[0], 0)
	wantEqual(f, "drained", drain(f, query()), []string{"a1", "a2"})
	f.wantKept(3, 1)
}

func settleUnknown(f *fixture) {
	id := f.add(message("g", "a"))
	gone := id[0] + 1000
	f.settle(engine.Settlement{
		Delivered: []int64{gone, -1, 0},
		Failed:    []engine.Failure{{ID: gone + 1}},
		Dead:      []engine.Failure{{ID: gone + 2}},
	})
	f.settle(engine.Settlement{Delivered: []int64{gone}, Keep: true})
	f.wantTypes(f.peek(lane, query()), "a")
	f.wantKept(0, 0)
}

func settleForeign(f *fixture) {
	row := message("g", "a")
	row.Outbox = Mails
	id := f.add(row)
	f.settle(engine.Settlement{Delivered: id})
	f.settle(engine.Settlement{Delivered: id, Keep: true})
	f.fail(time.Hour, id[0])
	f.kill(id[0])
	f.wantTypes(f.peek(engine.Lane{Outbox: Mails, Partitions: 1}, query()), "a")
}

func settleMany(f *fixture) {
	var rows []engine.Row
	for i := range 3001 {
		rows = append(rows, message("", fmt.Sprint(i)))
	}
	id := f.add(rows...)
	f.settle(engine.Settlement{
		Delivered: id[1:],
		Failed:    []engine.Failure{{ID: id[0], Error: "refused"}},
	})
	f.wantTypes(f.peek(lane, query()), "0")
}

func settleDelay(f *fixture) {
	id := f.add(messages("", "a", "b")...)
	f.settle(engine.Settlement{Failed: []engine.Failure{
		{ID: id[0], Delay: 2 * time.Hour}, {ID: id[1], Delay: time.Hour},
	}})
	page := f.peek(lane, query())
	f.wantTypes(page)
	if page.NextDue <= 59*time.Minute || page.NextDue > time.Hour {
		f.Errorf("next due in %v, want an hour", page.NextDue)
	}
}

func settleError(f *fixture) {
	text := strings.Repeat("é'\"\\\n", engine.MaxErrorBytes/6)
	id := f.add(message("g", "a"))
	f.settle(engine.Settlement{Failed: []engine.Failure{{ID: id[0], Error: text}}})
	if got := f.peek(lane, query()).Envelopes[0].LastError; got != text {
		f.Errorf("error text of %d bytes came back as %d bytes", len(text), len(got))
	}
}

func settleNothing(f *fixture) {
	f.add(message("g", "a"))
	f.settle(engine.Settlement{})
	f.settle(engine.Settlement{Keep: true, Delivered: []int64{}})
	f.wantTypes(f.peek(lane, query()), "a")
}
