package storagetest

import (
	"bytes"
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/gormoutbox/outbox/engine"
)

var insertTests = []test{
	{"a committed message exists", insertCommitted},
	{"a message exists from its commit on", insertInvisible},
	{"a message rolled back never existed", insertRolledBack},
	{"ids rise in call order", insertIDs},
	{"ids rise across the outboxes of a table", insertMixed},
	{"one call fills several tables", insertTables},
	{"a thousand messages in one call", insertMany},
	{"fifty messages of one transaction keep their order", insertTransaction},
	{"the stored envelopes come back when asked for", insertReturning},
	{"payloads come back byte for byte", insertPayloads},
	{"headers come back as they were", insertHeaders},
	{"odd names come back as they were", insertNames},
	{"the partition follows the hash and the count in force", insertPartitions},
	{"due times", insertDue},
	{"an ended context inserts nothing", insertCancelled},
	{"no rows", insertNothing},
	{"publishers of a group take turns", insertSerialised},
}

func insertCommitted(f *fixture) {
	before := f.peek(lane, query())
	f.wantTypes(before)
	f.add(message("g", "a"))
	f.wantTypes(f.peek(lane, query()), "a")
}

func insertInvisible(f *fixture) {
	tx := f.begin()
	_, err := f.Storage.Insert(f.ctx, tx, messages("g", "a"), false)
	f.must("insert", err)
	f.wantTypes(f.peek(lane, query()))
	f.must("commit", tx.Commit())
	f.wantTypes(f.peek(lane, query()), "a")
}

func insertRolledBack(f *fixture) {
	tx := f.begin()
	_, err := f.Storage.Insert(f.ctx, tx, messages("g", "a", "b"), false)
	f.must("insert", err)
	f.must("rollback", tx.Rollback())
	f.add(message("g", "c"))
	f.wantTypes(f.peek(lane, query()), "c")
}

func insertIDs(f *fixture) {
	got := f.add(messages("g", "a", "b", "c")...)
	got = append(got, f.add(messages("h", "d", "e")...)...)
	if len(got) != 5 || !rising(got) {
		f.Errorf("ids = %v, want five that rise", got)
	}
	// An id is never given again, not even the last one.
	f.settle(engine.Settlement{Delivered: got})
	if next := f.add(message("g", "f")); next[0] <= got[4] {
		f.Errorf("id after %v were delivered = %d", got, next[0])
	}
}

func insertMixed(f *fixture) {
	var rows []engine.Row
	for i := range 9 {
		row := message("g", fmt.Sprint(i))
		if i%2 == 1 {
			row.Outbox = Mails
		}
		rows = append(rows, row)
	}
	tx := f.begin()
	stored, err := f.Storage.Insert(f.ctx, tx, rows, true)
	f.must("insert", err)
	f.must("commit", tx.Commit())
	if !rising(ids(stored)) {
		f.Errorf("ids = %v, want them to rise", ids(stored))
	}
	f.wantTypes(f.peek(lane, query()), "0", "2", "4", "6", "8")
	f.wantTypes(f.peek(engine.Lane{Outbox: Mails, Partitions: 1}, query()), "1", "3", "5", "7")
}

func insertTables(f *fixture) {
	rows := messages("g", "a", "b", "c", "d")
	rows[0].Outbox, rows[2].Outbox = Audit, Audit
	tx := f.begin()
	stored, err := f.Storage.Insert(f.ctx, tx, rows, true)
	f.must("insert", err)
	f.must("commit", tx.Commit())
	wantEqual(f, "stored", types(stored), []string{"a", "b", "c", "d"})
	for i, e := range stored {
		if e.Outbox != rows[i].Outbox {
			f.Errorf("outbox of %q = %q, want %q", e.Type, e.Outbox, rows[i].Outbox)
		}
	}
	if stored[0].Installation == stored[1].Installation {
		f.Errorf("two tables share the installation %q", stored[0].Installation)
	}
	f.wantTypes(f.peek(lane, query()), "b", "d")
	f.wantTypes(f.peek(engine.Lane{Outbox: Audit, Partitions: 1}, query()), "a", "c")
}

func insertMany(f *fixture) {
	var rows []engine.Row
	var want []string
	for i := range 1203 {
		row := message([]string{"", "g", "h"}[i%3], fmt.Sprint(i))
		if i%5 == 0 {
			row.Headers = map[string]string{"n": fmt.Sprint(i)}
		}
		rows = append(rows, row)
		want = append(want, row.Type)
	}
	tx := f.begin()
	_, err := f.Storage.Insert(f.ctx, tx, rows, false)
	f.must("insert", err)
	f.must("commit", tx.Commit())
	page := f.peek(lane, engine.Query{Limit: len(rows) + 1, MaxBytes: 1 << 20})
	f.wantTypes(page, want...)
	for i, e := range page.Envelopes {
		if e.GroupKey != rows[i].GroupKey || !maps.Equal(e.Headers, rows[i].Headers) {
			f.Fatalf("message %d = group %q, headers %v", i, e.GroupKey, e.Headers)
		}
	}
}

// C17
func insertTransaction(f *fixture) {
	tx := f.begin()
	var want []string
	for i := range 50 {
		want = append(want, fmt.Sprint(i))
		_, err := f.Storage.Insert(f.ctx, tx, messages("g", want[i]), false)
		f.must("insert", err)
	}
	f.must("commit", tx.Commit())
	f.wantTypes(f.peek(lane, query()), want...)
}

func insertReturning(f *fixture) {
	rows := messages("g", "a", "b", "c")
	rows[1].Headers = map[string]string{"k": "v"}
	rows[1].GroupKey = ""
	rows[2].Delay = time.Hour
	tx := f.begin()
	stored, err := f.Storage.Insert(f.ctx, tx, rows, true)
	f.must("insert", err)
	none, err := f.Storage.Insert(f.ctx, tx, messages("g", "d"), false)
	f.must("insert", err)
	f.must("commit", tx.Commit())
	if len(none) != 0 {
		f.Errorf("%d envelopes came back that nobody asked for", len(none))
	}
	if wait := stored[2].ScheduledAt.Sub(stored[2].InsertedAt); wait != time.Hour {
		f.Errorf("due %v after the add, want 1h", wait)
	}
	fetched := f.peek(lane, query()).Envelopes
	if len(fetched) != 3 {
		f.Fatalf("fetched %v, want a, b and d", types(fetched))
	}
	for i := range 2 {
		wantEnvelope(f, stored[i], fetched[i])
	}
}

func wantEnvelope(f *fixture, got, want engine.Envelope) {
	f.Helper()
	if !got.ScheduledAt.Equal(want.ScheduledAt) || !got.InsertedAt.Equal(want.InsertedAt) {
		f.Errorf("times of %q = %v, %v, want %v, %v", want.Type, got.ScheduledAt, got.InsertedAt, want.ScheduledAt, want.InsertedAt)
	}
	if !maps.Equal(got.Headers, want.Headers) || !bytes.Equal(got.Payload, want.Payload) {
		f.Errorf("content of %q differs", want.Type)
	}
	got.Headers, got.Payload, got.ScheduledAt, got.InsertedAt = want.Headers, want.Payload, want.ScheduledAt, want.InsertedAt
	if a, b := fmt.Sprintf("%+v", got), fmt.Sprintf("%+v", want); a != b {
		f.Errorf("envelope = %s\nwant %s", a, b)
	}
}

func insertPayloads(f *fixture) {
	every := make([]byte, 256)
	for i := range every {
		every[i] = byte(i)
	}
	payloads := [][]byte{nil, {}, {0}, every, bytes.Repeat(every, 4096), []byte(`{"a":"\u0000"}`), []byte(`\x41`)}
	var rows []engine.Row
	for i, p := range payloads {
		rows = append(rows, engine.Row{Outbox: Orders, Type: fmt.Sprint(i), Payload: p})
	}
	f.add(rows...)
	f.add(rows[0]) // alone, because a single row may take another way
	f.add(rows[3])
	page := f.peek(lane, engine.Query{Limit: 100, MaxBytes: 16 << 20})
	f.wantTypes(page, "0", "1", "2", "3", "4", "5", "6", "0", "3")
	for i, e := range page.Envelopes {
		if want := append(payloads, nil, every)[i]; !bytes.Equal(e.Payload, want) {
			f.Errorf("payload %d has %d bytes that differ from the %d stored", i, len(e.Payload), len(want))
		}
	}
}

// oddTexts are valid UTF-8 without NUL, which is all that a storage is given.
var oddTexts = []string{
	"plain", `"`, `\`, `\"`, `a\u0041`, "\x01\b\f\n\r\t\x1f\x7f", "\u2028\u2029", "\ufffd", "\ufeff", "Ünï ☃ 🎉",
	"<a href='x'>&amp;</a>", "{}", `{"a":1}`, "null", "9007199254740993", " lead and trail ", "%s $1 ? ?1 :x @x", "';--",
	strings.Repeat("k", 3000),
}

// C35
func insertHeaders(f *fixture) {
	sets := []map[string]string{nil, {}, {"": ""}, {"case": "a", "Case": "b", "CASE": "c"}, {}}
	for _, text := range oddTexts {
		sets = append(sets, map[string]string{text: "v", "k": text, "both": text + text})
	}
	for _, set := range sets {
		f.add(engine.Row{Outbox: Orders, Type: "t", Headers: set})
	}
	page := f.peek(lane, query())
	if len(page.Envelopes) != len(sets) {
		f.Fatalf("fetched %d messages, want %d", len(page.Envelopes), len(sets))
	}
	for i, e := range page.Envelopes {
		if !maps.Equal(e.Headers, sets[i]) {
			f.Errorf("headers %d = %q, want %q", i, e.Headers, sets[i])
		}
		if len(sets[i]) == 0 && e.Headers != nil {
			f.Errorf("headers %d are empty, want nil", i)
		}
	}
}

func insertNames(f *fixture) {
	for _, text := range oddTexts {
		f.add(message(text, text))
	}
	page := f.peek(lane, query())
	f.wantTypes(page, oddTexts...)
	for i, e := range page.Envelopes {
		if e.GroupKey != oddTexts[i] {
			f.Errorf("group = %q, want %q", e.GroupKey, oddTexts[i])
		}
	}
}

func insertPartitions(f *fixture) {
	var rows []engine.Row
	for i := range 30 {
		rows = append(rows, message(fmt.Sprintf("group-%d", i), fmt.Sprint(i)))
	}
	f.SetPartitions(f.T, Orders, 3)
	tx := f.begin()
	stored, err := f.Storage.Insert(f.ctx, tx, append(rows, engine.Row{Outbox: Orders, Hash: 1<<63 - 1, Type: "extreme"}), true)
	f.must("insert", err)
	f.must("commit", tx.Commit())
	want := make([][]string, 3)
	for i, e := range stored {
		hash := uint64(1<<63 - 1)
		if i < len(rows) {
			hash = rows[i].Hash
		}
		p := engine.Partition(hash, 3)
		want[p] = append(want[p], e.Type)
		if e.Partition != p {
			f.Errorf("partition of %q = %d, want %d", e.Type, e.Partition, p)
		}
	}
	for p := range 3 {
		page := f.peek(engine.Lane{Outbox: Orders, Partition: p, Partitions: 3}, query())
		f.wantTypes(page, want[p]...)
	}
}

func insertDue(f *fixture) {
	now := f.peek(lane, query()).Now
	past, future, soon := message("g", "past"), message("g", "future"), message("g", "delayed")
	past.DeliverAt = now.Add(-time.Hour)
	future.DeliverAt = now.Add(48 * time.Hour)
	soon.Delay = time.Hour
	f.add(past, future, soon, message("g", "at once"))
	page := f.peek(lane, query())
	// A time that has passed means at once, so the call order holds.
	f.wantTypes(page, "past", "at once")
	for _, e := range page.Envelopes {
		if !e.ScheduledAt.Equal(e.InsertedAt) {
			f.Errorf("%q is due at %v, want %v when it was added", e.Type, e.ScheduledAt, e.InsertedAt)
		}
	}
	if page.NextDue <= 0 || page.NextDue > time.Hour {
		f.Errorf("next due in %v, want at most an hour", page.NextDue)
	}
}

func insertCancelled(f *fixture) {
	ctx, cancel := context.WithCancel(f.ctx)
	tx := f.begin()
	cancel()
	if _, err := f.Storage.Insert(ctx, tx, messages("g", "a"), false); err == nil {
		f.Error("insert succeeded with an ended context")
	}
	_ = tx.Rollback()
	f.wantTypes(f.peek(lane, query()))
}

func insertNothing(f *fixture) {
	tx := f.begin()
	stored, err := f.Storage.Insert(f.ctx, tx, nil, true)
	f.must("insert", err)
	f.must("commit", tx.Commit())
	if len(stored) != 0 {
		f.Errorf("stored %d messages, want none", len(stored))
	}
}

// C17
func insertSerialised(f *fixture) {
	if !f.harness.ConcurrentWriters {
		f.Skip("the database has one writer")
	}
	first := f.begin()
	_, err := f.Storage.Insert(f.ctx, first, messages("g", "a"), false)
	f.must("insert", err)
	f.add(message("h", "other")) // other groups do not wait

	// The lock is held, so this fails however long it waits.
	blocked, cancel := context.WithTimeout(f.ctx, 200*time.Millisecond)
	defer cancel()
	if _, err := f.Storage.Insert(blocked, f.begin(), messages("g", "x"), false); err == nil {
		f.Error("a second publisher of the group did not wait for the first")
	}

	// The waiting publisher draws its ids after the one it waits for.
	done := make(chan error, 1)
	second := f.begin()
	go func() {
		_, err := f.Storage.Insert(f.ctx, second, messages("g", "c"), false)
		if err == nil {
			err = second.Commit()
		}
		done <- err
	}()
	_, err = f.Storage.Insert(f.ctx, first, messages("g", "b"), false)
	f.must("insert", err)
	f.must("commit", first.Commit())
	f.must("second publisher", <-done)
	got := types(f.peek(lane, query()).Envelopes)
	got = slices.DeleteFunc(got, func(s string) bool { return s == "other" })
	wantEqual(f, "delivered in the group", got, []string{"a", "b", "c"})
}

func rising(list []int64) bool {
	for i := 1; i < len(list); i++ {
		if list[i] <= list[i-1] {
			return false
		}
	}
	return true
}
