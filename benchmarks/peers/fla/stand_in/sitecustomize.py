"""Python imports this file by itself where its folder is on the path."""

import fla_ahead

fla_ahead.use()
