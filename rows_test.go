package outbox

import (
	"fmt"
	"testing"

	"github.com/gormoutbox/outbox/engine"
)

func TestWakesOf(t *testing.T) {
	t.Parallel()
	rows := []engine.Row{{Outbox: "a", Hash: 1}, {Outbox: "a", Hash: 2}, {Outbox: "a", Hash: 1}}
	if got := wakesOf(rows); len(got) != 2 || got[0] != (engine.Wake{Outbox: "a", Hash: 1}) || got[1] != (engine.Wake{Outbox: "a", Hash: 2}) {
		t.Errorf("wakesOf = %v", got)
	}
}

func TestManyWakesBecomeOne(t *testing.T) {
	t.Parallel()
	var rows []engine.Row
	for i := range uint64(maxWakes + 10) {
		rows = append(rows, engine.Row{Outbox: "a", Hash: i})
	}
	if got := wakesOf(rows[:maxWakes]); len(got) != maxWakes {
		t.Errorf("%d wakes of %d groups", len(got), maxWakes)
	}
	rows = append(rows, engine.Row{Outbox: "b", Hash: 3})
	got := make(map[engine.Wake]bool)
	for _, w := range wakesOf(rows) {
		got[w] = true
	}
	if len(got) != 2 || !got[engine.Wake{Outbox: "a", All: true}] || !got[engine.Wake{Outbox: "b", Hash: 3}] {
		t.Errorf("wakesOf = %v", got)
	}
}

func TestRow(t *testing.T) {
	t.Parallel()
	tests := map[string]struct {
		outbox  Outbox
		group   string
		locks   bool
		lockAll bool
		spread  bool // over the partitions, whatever the group
		hash    uint64
	}{
		"grouped":                 {Outbox{}, "g", true, false, false, engine.GroupHash("g")},
		"ungrouped":               {Outbox{}, "", false, false, true, 0},
		"concurrent":              {Outbox{ConcurrentPublishers: true}, "g", false, false, false, engine.GroupHash("g")},
		"none":                    {Outbox{Ordering: None}, "g", false, false, true, 0},
		"total":                   {Outbox{Ordering: Total}, "g", true, true, false, 0},
		"total ungrouped":         {Outbox{Ordering: Total}, "", true, true, false, 0},
		"total but concurrent":    {Outbox{Ordering: Total, ConcurrentPublishers: true}, "g", false, false, false, 0},
		"ungrouped as concurrent": {Outbox{ConcurrentPublishers: true}, "", false, false, true, 0},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			tt.outbox.Name = "o"
			in, err := New(Config{Outboxes: []Outbox{tt.outbox}})
			if err != nil {
				t.Fatal(err)
			}
			hashes := make(map[uint64]bool)
			for range 64 {
				row := in.row(Message{Outbox: "o", Type: "t", GroupKey: tt.group})
				if row.Lock != tt.locks || row.LockAll != tt.lockAll {
					t.Fatalf("Lock = %v, LockAll = %v", row.Lock, row.LockAll)
				}
				if row.Hash>>63 != 0 {
					t.Fatalf("Hash %d does not fit a signed integer", row.Hash)
				}
				hashes[row.Hash] = true
			}
			if tt.spread && len(hashes) < 32 || !tt.spread && (len(hashes) != 1 || !hashes[tt.hash]) {
				t.Errorf("hashes of 64 rows: %s", fmt.Sprint(hashes))
			}
		})
	}
}
