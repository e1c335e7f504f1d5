package storagetest

import (
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/gormoutbox/outbox/engine"
)

var probeTests = []test{
	{"nothing to do", probeEmpty},
	{"ready, due and coming messages, by partition", probeFinds},
	{"facts", probeFacts},
	{"outboxes of several tables", probeTables},
	{"stray messages", probeStray},
}

func (f *fixture) probe(outbox string) engine.Probed {
	f.Helper()
	all, err := f.Storage.Probe(f.ctx, []string{outbox})
	f.must("probe", err)
	got, ok := all[outbox]
	if !ok || len(all) != 1 {
		f.Fatalf("probe of %q gave %v", outbox, all)
	}
	return got
}

func probeEmpty(f *fixture) {
	got := f.probe(Orders)
	if got.Partitions != 1 || got.Paused || got.Stray || len(got.Ready) > 0 || len(got.NextDue) > 0 {
		f.Errorf("probe of an empty outbox = %+v", got)
	}
	none, err := f.Storage.Probe(f.ctx, nil)
	f.must("probe of no outbox", err)
	if len(none) != 0 {
		f.Errorf("probe of no outbox = %v", none)
	}
}

// inPartition makes a row of the partition.
func inPartition(p int, typ string) engine.Row {
	row := message("", typ)
	row.Hash = uint64(p)
	return row
}

func probeFinds(f *fixture) {
	f.SetPartitions(f.T, Orders, 5)
	late, later := inPartition(3, "late"), inPartition(3, "later")
	late.Delay, later.Delay = time.Hour, 2*time.Hour
	id := f.add(inPartition(0, "a"), inPartition(2, "b"), late, later, inPartition(4, "c"), inPartition(4, "d"))
	f.kill(id[0])
	f.fail(time.Hour, id[4])
	f.SetDue(f.T, Orders, id[4], 0)
	f.settle(engine.Settlement{Delivered: []int64{id[5]}, Keep: true})
	got := f.probe(Orders)
	slices.Sort(got.Ready)
	wantEqual(f, "ready partitions", got.Ready, []int{2, 4})
	if due := got.NextDue[3]; len(got.NextDue) != 1 || due <= 59*time.Minute || due > time.Hour {
		f.Errorf("next due = %v, want partition 3 in an hour", got.NextDue)
	}
	if got.Stray {
		f.Error("stray messages reported where there are none")
	}
}

func probeFacts(f *fixture) {
	f.SetPartitions(f.T, Orders, 3)
	f.SetPaused(f.T, Orders, true)
	if got := f.probe(Orders); got.Partitions != 3 || !got.Paused {
		f.Errorf("facts = %+v, want 3 partitions and paused", got.Facts)
	}
	if got := f.probe(Mails); got.Partitions != 1 || got.Paused {
		f.Errorf("facts of the other outbox = %+v", got.Facts)
	}
}

func probeTables(f *fixture) {
	mail, audit := message("g", "m"), message("g", "a")
	mail.Outbox, audit.Outbox = Mails, Audit
	f.add(mail, audit)
	all, err := f.Storage.Probe(f.ctx, []string{Audit, Orders, Mails})
	f.must("probe", err)
	for outbox, want := range map[string][]int{Orders: nil, Mails: {0}, Audit: {0}} {
		wantEqual(f, "ready partitions of "+outbox, all[outbox].Ready, want)
	}
}

func probeStray(f *fixture) {
	f.SetPartitions(f.T, Orders, 3)
	id := f.add(inPartition(1, "a"), inPartition(2, "b"))
	for _, n := range []int{2, 4} {
		f.SetPartitions(f.T, Orders, n)
		if got := f.probe(Orders); !got.Stray || len(got.Ready) > 0 {
			f.Errorf("probe with 3-partition messages under %d = %+v, want stray and nothing ready", n, got)
		}
	}
	f.SetPartitions(f.T, Orders, 3)
	if got := f.probe(Orders); got.Stray || len(got.Ready) != 2 {
		f.Errorf("probe under the messages' own count = %+v", got)
	}
	f.SetPartitions(f.T, Orders, 2)
	f.settle(engine.Settlement{Delivered: id})
	if got := f.probe(Orders); got.Stray {
		f.Error("stray messages reported after all were delivered")
	}
}

var remapTests = []test{
	{"stray messages hold every lane", remapGate},
	{"messages move to where they belong", remapMoves},
	{"the count may shrink and grow while messages wait", remapTwice},
	{"a failed message holds its group across the change", remapFailed},
	{"a dead message holds its group across the change", remapDead},
	{"a lane in delivery is not touched", remapHeld},
	{"nothing to move", remapNothing},
}

// remap moves everything, limit messages at a time.
func (f *fixture) remap(limit int) (moved int) {
	f.Helper()
	for {
		n, more, err := f.Storage.Remap(f.ctx, Orders, limit)
		f.must("remap", err)
		if n > limit || more && n == 0 {
			f.Fatalf("remap moved %d of at most %d, more = %v, though no lane is owned", n, limit, more)
		}
		if moved += n; !more {
			return moved
		}
	}
}

func remapGate(f *fixture) {
	id := f.add(message("g", "a"))
	f.SetPartitions(f.T, Orders, 2)
	f.wantState(f.peek(lane, query()), engine.PageMoved)
	for p := range 2 {
		f.wantState(f.peek(engine.Lane{Outbox: Orders, Partition: p, Partitions: 2}, query()), engine.PageStray)
	}
	f.wantTypes(f.peek(engine.Lane{Outbox: Mails, Partitions: 1}, query())) // others are not concerned

	// A message that waits for its retry may hold the group of a ready one.
	f.SetPartitions(f.T, Orders, 1)
	f.fail(time.Hour, id[0])
	f.SetPartitions(f.T, Orders, 2)
	for p := range 2 {
		f.wantState(f.peek(engine.Lane{Outbox: Orders, Partition: p, Partitions: 2}, query()), engine.PageStray)
	}
}

func remapMoves(f *fixture) {
	var rows []engine.Row
	for i := range 25 {
		rows = append(rows, message(fmt.Sprint(i%6), fmt.Sprint(i)))
	}
	rows = append(rows, message("", "u"), delayed("0", "later", time.Hour))
	f.add(rows...)
	f.SetPartitions(f.T, Orders, 3)
	f.add(message("0", "last"))
	if moved := f.remap(4); moved != len(rows) {
		f.Errorf("moved %d messages, want %d", moved, len(rows))
	}
	var got []string
	for p := range 3 {
		page := f.peek(engine.Lane{Outbox: Orders, Partition: p, Partitions: 3}, query())
		if page.State != engine.PageOpen || !rising(ids(page.Envelopes)) {
			f.Errorf("partition %d: state %d, ids %v", p, page.State, ids(page.Envelopes))
		}
		for _, e := range page.Envelopes {
			if e.Partition != p || e.GroupKey != "" && engine.Partition(engine.GroupHash(e.GroupKey), 3) != p {
				f.Errorf("%q of group %q is in partition %d", e.Type, e.GroupKey, p)
			}
		}
		got = append(got, types(page.Envelopes)...)
	}
	if len(got) != len(rows) || !slices.Contains(got, "last") || slices.Contains(got, "later") {
		f.Errorf("fetched %v from all lanes", got)
	}
}

// C56
func remapTwice(f *fixture) {
	var want []string
	for i, n := range []int{4, 2, 7, 1} {
		f.SetPartitions(f.T, Orders, n)
		typ := fmt.Sprint(i)
		f.add(message("g", typ))
		want = append(want, typ)
	}
	f.remap(1)
	f.wantTypes(f.peek(lane, query()), want...)
}

func remapFailed(f *fixture) {
	id := f.add(messages("g", "a")...)
	f.fail(time.Hour, id[0])
	f.SetPartitions(f.T, Orders, 2)
	f.add(message("g", "b"))
	f.remap(10)
	home := engine.Lane{Outbox: Orders, Partition: engine.Partition(engine.GroupHash("g"), 2), Partitions: 2}
	f.wantTypes(f.peek(home, query()))
	f.settle(engine.Settlement{Delivered: id})
	f.wantTypes(f.peek(home, query()), "b")
}

func remapDead(f *fixture) {
	id := f.add(messages("g", "a")...)
	f.kill(id[0])
	f.SetPartitions(f.T, Orders, 2)
	f.add(message("g", "b"))
	home := engine.Lane{Outbox: Orders, Partition: engine.Partition(engine.GroupHash("g"), 2), Partitions: 2}
	held := query()
	held.HoldDead = true
	f.wantState(f.peek(home, held), engine.PageStray)
	f.wantTypes(f.peek(home, query()), "b") // a dead message that holds nobody is in nobody's way
	if moved := f.remap(10); moved != 1 {
		f.Errorf("moved %d messages, want the dead one", moved)
	}
	f.wantTypes(f.peek(home, held))
	f.Revive(f.T, Orders, id[0])
	f.wantTypes(f.peek(home, held), "a", "b")
}

func remapHeld(f *fixture) {
	f.SetPartitions(f.T, Orders, 2)
	f.add(inPartition(0, "a"), inPartition(1, "b"))
	held := engine.Lane{Outbox: Orders, Partition: 1, Partitions: 2}
	err := f.claim(held, func(_ context.Context, c engine.Claim, page engine.Page) error {
		f.SetPartitions(f.T, Orders, 1)
		moved, more, err := f.Storage.Remap(f.ctx, Orders, 10)
		f.must("remap beside a claim", err)
		if moved != 1 || !more {
			f.Errorf("moved %d, more = %v, want the message of the free lane alone", moved, more)
		}
		moved, more, err = f.Storage.Remap(f.ctx, Orders, 10)
		f.must("remap beside a claim", err)
		if moved != 0 || !more {
			f.Errorf("moved %d, more = %v, want nothing: the lane is busy", moved, more)
		}
		c.Settle(engine.Settlement{Delivered: ids(page.Envelopes)})
		return nil
	})
	f.must("claim", err)
	if moved := f.remap(10); moved != 0 {
		f.Errorf("moved %d, though the rest was delivered", moved)
	}
	f.wantTypes(f.peek(lane, query()), "a")
}

func remapNothing(f *fixture) {
	f.add(message("g", "a"))
	if moved := f.remap(10); moved != 0 {
		f.Errorf("moved %d messages that were where they belong", moved)
	}
	f.wantTypes(f.peek(lane, query()), "a")
}
