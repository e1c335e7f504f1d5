package outbox_test

import (
	"context"
	"encoding/json"
	"strings"
	"testing"

	"gorm.io/gorm"

	"github.com/gormoutbox/outbox"
	"github.com/gormoutbox/outbox/internal/testdb"
)

// Stats show who delivers, on PostgreSQL to every node, and what is in the
// table but not in the configuration.
func TestStatsOfARunningInstance(t *testing.T) {
	t.Parallel()
	onEach(t, func(t *testing.T, open func(...testdb.Option) *gorm.DB) {
		db := open()
		began, goOn := make(chan struct{}), make(chan struct{})
		in := setUp(t, db, one(func(o *outbox.Outbox) {
			o.Relay = outbox.Each(func(context.Context, outbox.Envelope) error {
				close(began)
				<-goOn
				return nil
			})
		}))
		defer close(goOn)
		strangerDB := open()
		setUp(t, strangerDB, outbox.Config{Outboxes: named("forgotten")})
		publish(t, strangerDB, message("x"))
		publish(t, db, message("a"))
		start(t, in)
		<-began

		s, err := in.Stats(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		lane := s.Outboxes[0].Lanes[0]
		if lane.Local == nil || !lane.Local.Owning || lane.Unattended != 0 || s.Outboxes[0].Unattended != 0 {
			t.Errorf("the lane is %+v with %+v", lane, lane.Local)
		}
		if onPostgres := db.Name() == "postgres"; (lane.Owner != nil) != onPostgres {
			t.Errorf("the owner is %+v", lane.Owner)
		}
		if len(s.Found) != 1 || s.Found[0].Outbox != "forgotten" || s.Found[0].Due != 1 {
			t.Errorf("found %+v", s.Found)
		}
		text, err := json.Marshal(s)
		if err != nil || !strings.Contains(string(text), `"due":1`) {
			t.Errorf("as JSON: %s, %v", text, err)
		}
	})
}
